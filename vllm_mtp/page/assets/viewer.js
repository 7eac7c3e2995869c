"use strict";
// Steps through the rounds of a request. Text of a model is only ever textContent.

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

// Blanks and line ends are drawn; a token that completes no character is a dot.
function visible(text) {
  return text === "" ? "\u00b7" : text.replaceAll("\n", "\u23ce").replaceAll(" ", "\u2423");
}

function numbered(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

function kindOf(round) {
  if (!round.draft.length) return "plain";
  return round.num_accepted === round.draft.length ? "bonus" : "recovered";
}

// The tokens that a round commits, in order: text and kind.
function keptOf(round) {
  const kept = round.draft.slice(0, round.num_accepted)
    .map((text) => ({ text, kind: "accepted" }));
  kept.push({ text: round.next, kind: kindOf(round) });
  return kept.slice(0, round.num_committed);
}

class Viewer {
  constructor(onChange) {
    const byId = (id) => document.getElementById(id);
    this.parts = Object.fromEntries(["draft", "said", "slow", "fast", "slow-caption",
      "fast-caption", "sums", "round", "previous", "next"].map((id) => [id, byId(id)]));
    this.onChange = onChange;
    this.request = null;
    this.index = 0;
    this.parts.round.addEventListener("input", (event) => this.go(event.target.value - 1));
    this.parts.previous.addEventListener("click", () => this.go(this.index - 1));
    this.parts.next.addEventListener("click", () => this.go(this.index + 1));
    document.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const takesKeys = event.target.closest?.("input, select, textarea, .text, .scroll");
    if (takesKeys || event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = { ArrowRight: this.index + 1, ArrowLeft: this.index - 1, Home: 0,
      End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.go(steps[event.key]);
  }

  // Another request, or more rounds of the same, whose round stays.
  show(request, isSame = false) {
    this.request = request;
    this.go(isSame ? this.index : 0);
    this.onChange(request);
  }

  go(index) {
    const rounds = this.request?.rounds ?? [];
    this.index = Math.max(0, Math.min(index, rounds.length - 1));
    this.parts.round.max = Math.max(rounds.length, 1);
    this.parts.round.value = this.index + 1;
    this.parts.previous.disabled = this.index === 0;
    this.parts.next.disabled = this.index >= rounds.length - 1;
    this.draw();
  }

  draw() {
    const rounds = this.request?.rounds ?? [];
    for (const id of ["draft", "said", "slow", "fast", "slow-caption", "fast-caption",
      "sums"]) this.parts[id].replaceChildren();
    if (!rounds.length) {
      this.parts.said.textContent = this.request ? "No round yet." : "";
      return;
    }
    this.drawRound(rounds[this.index]);
    this.drawTexts(rounds);
    this.drawSums(rounds);
  }

  drawRound(round) {
    round.draft.forEach((text, i) => {
      const kind = i < round.num_accepted ? "accepted" : "rejected";
      this.chip(text, kind, i < round.num_accepted && i >= round.num_committed);
    });
    this.chip(round.next, kindOf(round), round.num_committed <= round.num_accepted);
    const draft = round.draft.length
      ? `${round.num_accepted} of ${round.draft.length} draft tokens accepted, ` +
        `then the ${kindOf(round)} token`
      : "no draft, one token of the target";
    const beyond = round.num_accepted + 1 - round.num_committed;
    this.parts.said.textContent = `Round ${this.index + 1} of ` +
      `${this.request.rounds.length}: ${draft}.` +
      (beyond ? ` ${beyond} of these lie beyond the end of the text.` : "");
  }

  chip(text, kind, isBeyond) {
    const made = element("span", `token ${kind}${isBeyond ? " beyond" : ""}`, visible(text));
    made.title = kind;
    this.parts.draft.append(made);
  }

  drawTexts(rounds) {
    const before = rounds.slice(0, this.index).flatMap(keptOf);
    const now = keptOf(rounds[this.index]);
    const all = before.concat(now), numPasses = this.index + 1;
    this.fill("fast", all, before.length);
    this.fill("slow", all.slice(0, numPasses).map((each) => ({ ...each, kind: "plain" })),
      numPasses - 1);
    const passes = numbered(numPasses, "pass", "passes");
    const tokens = (number) => numbered(number, "token", "tokens");
    this.parts["slow-caption"].textContent =
      `Autoregressive: ${passes}, ${tokens(Math.min(numPasses, all.length))}`;
    this.parts["fast-caption"].textContent = `Speculative: ${passes}, ${tokens(all.length)}`;
  }

  fill(id, tokens, firstNew) {
    const place = this.parts[id];
    place.append(element("span", "prompt", this.request.prompt));
    tokens.forEach(({ text, kind }, i) => {
      place.append(element("span", `token ${kind}${i >= firstNew ? " now" : ""}`, text));
    });
    place.scrollTop = place.scrollHeight;
  }

  drawSums(rounds) {
    const sum = (of) => rounds.reduce((total, each) => total + of(each), 0);
    const drafted = sum((each) => each.draft.length);
    const accepted = sum((each) => each.num_accepted);
    const tokens = sum((each) => each.num_committed);
    const drafts = rounds.filter((each) => each.draft.length).length;
    const parts = [`Whole request: ${rounds.length} rounds, ${drafts} of them with drafts; ` +
      `${drafted} draft tokens, ${accepted} accepted, ${drafted - accepted} rejected; ` +
      `${tokens} tokens, ${(tokens / rounds.length).toFixed(2)} a round.`];
    const p = measuredProbability(rounds);
    if (p !== null) parts.push(`A draft token was accepted with p = ${p.toFixed(2)}.`);
    if (this.request.num_left_out) {
      parts.push(`${this.request.num_left_out} later rounds are not kept.`);
    }
    this.parts.sums.textContent = parts.join(" ");
  }
}
