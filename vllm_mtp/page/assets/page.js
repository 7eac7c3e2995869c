"use strict";
// Puts the parts together: data that is embedded, or asked of the server now and then.

const POLL_MS = 2000;
const SIMULATION = "simulation";
const SIMULATED_ROUNDS = 40;
const SIMULATED_ROUNDS_OF_TABLE = 20000;
const $ = (id) => document.getElementById(id);

class ClosedForm {
  constructor(onChange) {
    this.means = [];
    const range = (chart, low, high) => [0, Math.max(high ?? 1, 2) * 1.1];
    this.chart = new Chart("form-chart", "number", [
      { label: "closed form", colour: "c1" }, { label: "this K", colour: "c3", points: true },
      { label: "this request", colour: "c2", points: true }], null, range);
    for (const id of ["p", "k"]) {
      $(id).addEventListener("input", () => { this.draw(); onChange(); });
    }
  }

  get p() { return Number($("p").value); }
  get k() { return Number($("k").value); }

  measured(request) {
    this.means = request ? measuredMeans(request.rounds) : [];
    this.draw();
  }

  draw() {
    const { p, k } = this;
    $("p-value").textContent = p.toFixed(2);
    $("k-value").textContent = String(k);
    const lengths = Array.from({ length: MAX_K + 1 }, (_, each) => each);
    this.chart.draw(lengths, lengths.map((each) => tokensPerRound(p, each)),
      lengths.map((each) => (each === k ? tokensPerRound(p, k) : null)),
      lengths.map((each) => this.means[each] ?? null));
    const rows = lengths.slice(1).map((each) => {
      const row = element("tr", each === k ? "chosen" : "", "");
      const mean = this.means[each];
      for (const text of [String(each), tokensPerRound(p, each).toFixed(2),
        simulatedMean(p, each, SIMULATED_ROUNDS_OF_TABLE).toFixed(2),
        mean === null || mean === undefined ? "" : mean.toFixed(2)]) {
        row.append(element("td", "", text));
      }
      return row;
    });
    $("form-table").tBodies[0].replaceChildren(...rows);
  }
}

class Page {
  constructor() {
    this.form = new ClosedForm(() => this.simulate());
    this.viewer = new Viewer((request) => this.form.measured(
      this.chosen === SIMULATION ? null : request));
    this.requests = [];
    $("request").addEventListener("change", () => this.choose(this.chosen));
  }

  get chosen() { return $("request").value; }

  simulate() {
    if (this.chosen === SIMULATION) {
      const { p, k } = this.form;
      this.viewer.show(simulatedRequest(p, k, SIMULATED_ROUNDS), true);
    }
  }

  // Choices: [key, label]. A choice that is gone gives way to the first.
  list(choices) {
    const wanted = [...choices, [SIMULATION, "Simulation (sliders below)"]];
    const select = $("request"), chosen = this.chosen;
    if (document.activeElement === select && select.length) return; // it may be open
    const shown = Array.from(select.options, (each) => `${each.value} ${each.text}`);
    if (shown.join() === wanted.map((each) => each.join(" ")).join()) return;
    select.replaceChildren(...wanted.map(([key, label]) => new Option(label, key)));
    const isLeft = wanted.some(([key]) => key === chosen);
    // What was simulated for want of requests gives way to the first that comes.
    if (isLeft && (chosen !== SIMULATION || this.wasChosen)) select.value = chosen;
    else this.choose(this.chosen, false);
  }

  choose(key, byHand = true) {
    this.wasChosen = byHand;
    if (key === SIMULATION) {
      const { p, k } = this.form;
      this.viewer.show(simulatedRequest(p, k, SIMULATED_ROUNDS));
    } else this.open(key);
  }
}

function labelOf(request) {
  const { num_rounds: rounds, sums, has_ended: hasEnded } = request;
  return `${request.name}: ${sums.num_committed_tokens} tokens in ${rounds} rounds` +
    (hasEnded ? "" : ", running");
}

class FilePage extends Page {
  start(data) {
    this.requests = data.requests;
    $("status").textContent = data.model;
    this.list(data.requests.map((each, i) => [String(i), labelOf(each)]));
  }

  open(key) { this.viewer.show(this.requests[Number(key)]); }
}

class LivePage extends Page {
  constructor() {
    super();
    this.key = "";
    this.history = new History();
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.key = $("key").value;
      $("key").value = "";
      this.pollRequests();
    });
  }

  start() {
    $("live").hidden = false;
    this.charts = new LiveCharts();
    this.list([]);
    this.poll();
    setInterval(() => { if (!document.hidden) this.poll(); }, POLL_MS);
  }

  async poll() {
    await Promise.all([this.pollMetrics(), this.needsKey ? null : this.pollRequests()]);
  }

  async pollMetrics() {
    try {
      const answer = await fetch("metrics", { cache: "no-store" });
      if (!answer.ok) throw new Error(`/metrics: status ${answer.status}`);
      this.history.add(Date.now(), parseMetrics(await answer.text()));
      this.charts.draw(this.history);
      $("status").textContent = "live";
    } catch (error) {
      $("status").textContent = `not live: ${error.message}`;
    }
  }

  // An answer of the server's, or null without the right key.
  async ask(path) {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const answer = await fetch(path, { headers, cache: "no-store" });
    this.needsKey = answer.status === 401;
    $("key-form").hidden = !this.needsKey;
    if (this.needsKey) return null;
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    return answer.json();
  }

  async pollRequests() {
    try {
      const found = await this.ask("v1/mtp_plus/rounds");
      if (found === null) {
        $("request-note").textContent = this.key ? "The server refused this key." : "";
        return;
      }
      this.requests = found.requests;
      $("request-note").textContent = found.max_requests ? ""
        : 'Requests are shown if the server is started with "show_rounds".';
      const shown = this.requests.filter((each) => each.num_rounds);
      this.list(shown.map((each) => [each.key, labelOf(each)]));
      this.refresh();
    } catch (error) {
      $("request-note").textContent = `no requests: ${error.message}`;
    }
  }

  // More rounds of the request that is shown.
  refresh() {
    const listed = this.requests.find((each) => each.key === this.chosen);
    const shown = this.viewer.request;
    if (listed && shown?.key === listed.key && shown.rounds.length < listed.num_rounds) {
      this.open(listed.key, true);
    }
  }

  async open(key, isSame = false) {
    try {
      const request = await this.ask(`v1/mtp_plus/rounds/${encodeURIComponent(key)}`);
      if (request !== null && this.chosen === key) this.viewer.show(request, isSame);
    } catch (error) {
      $("request-note").textContent = `this request: ${error.message}`;
    }
  }
}

const embedded = $("data").textContent;
if (embedded) new FilePage().start(JSON.parse(embedded));
else new LivePage().start();
