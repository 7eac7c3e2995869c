"use strict";
// Charts of uPlot in the colours of the page, as wide as they may be.

const CHART_HEIGHT = 190;
const allCharts = [];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axis(values, size) {
  const each = { stroke: () => colour("faint"), font: "12px system-ui, sans-serif",
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1 } };
  if (values) each.values = (chart, splits) => splits.map(values);
  if (size) each.size = size;
  return each;
}

const percent = (value) => (value === null ? "" : `${Math.round(100 * value)} %`);
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([],
  { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const whole = (value) => (Number.isInteger(value) ? String(value) : "");

class Chart {
  // series: {label, colour, points?, bars?, fill?}; x: "time" or "number".
  constructor(id, x, series, yValues, yRange) {
    this.place = document.getElementById(id);
    const bars = series.some((each) => each.bars);
    this.data = [[], ...series.map(() => [])];
    this.options = {
      width: this.width, height: CHART_HEIGHT,
      cursor: { show: false }, legend: { show: series.length > 1, live: false },
      scales: {
        x: { time: x === "time",
          range: bars ? (chart, low, high) => [low - 0.6, high + 0.6] : undefined },
        y: { range: yRange },
      },
      axes: [axis(x === "time" ? clock : whole), axis(yValues, 56)],
      series: [{}, ...series.map(Chart.series)],
    };
    this.build();
    new ResizeObserver(() => this.plot.setSize(
      { width: this.width, height: CHART_HEIGHT })).observe(this.place);
    allCharts.push(this);
  }

  // Anew, too, when colours have changed: a legend keeps those that it began with.
  build() {
    this.plot?.destroy();
    this.plot = new uPlot({ ...this.options, width: this.width }, this.data, this.place);
  }

  get width() { return Math.max(this.place.clientWidth, 120); }

  static series(each) {
    const line = { label: each.label, stroke: () => colour(each.colour), width: 2,
      points: { show: each.points ?? false, size: 9,
        stroke: () => colour(each.colour), fill: () => colour(each.colour) } };
    if (each.points) line.paths = () => null;
    if (each.bars) line.paths = uPlot.paths.bars({ size: [0.7, 60] });
    if (each.bars || each.fill) line.fill = () => colour(each.colour);
    return line;
  }

  draw(...columns) {
    this.data = columns;
    this.plot.setData(columns);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const each of allCharts) each.build();
});

class LiveCharts {
  constructor() {
    const share = [0, 1];
    this.acceptance = new Chart("acceptance-chart", "number",
      [{ label: "acceptance", colour: "c2", bars: true }], percent, share);
    this.length = new Chart("length-chart", "number",
      [{ label: "request-steps", colour: "c1", bars: true }], percent, share);
    this.goodput = new Chart("goodput-chart", "time",
      [{ label: "tokens/s", colour: "c1" }], null, (chart, low, high) =>
        [0, Math.max(high ?? 0, 1) * 1.1]);
    // Each lies on those before it, so the last is drawn first.
    this.time = new Chart("time-chart", "time", TIME_PARTS.map((label, i) =>
      ({ label, colour: `c${i + 1}`, fill: true })).reverse(), percent, share);
  }

  draw(history) {
    if (history.isEmpty) return;
    const transposed = (rows) => [rows.map((row) => row[0]), rows.map((row) => row[1])];
    const acceptance = acceptanceByPosition(
      history.sum("draft_tokens"), history.sum("accepted_tokens"));
    this.acceptance.draw(...transposed(acceptance));
    note("acceptance-note", acceptance.map((row) => percent(row[1])).join(", "));
    const lengths = sharesByLength(history.sum("request_steps"));
    this.length.draw(...transposed(lengths));
    const mean = lengths.reduce((sum, [k, share]) => sum + k * share, 0);
    note("length-note", `${mean.toFixed(1)} in the mean`);
    const [times, rates] = history.series(goodput);
    this.goodput.draw(times, rates);
    const overall = goodput((name) => history.sum(name));
    note("goodput-note", overall === null ? "" : `${overall.toFixed(0)} tokens/s in decode`);
    this.drawTime(history);
  }

  drawTime(history) {
    const [times, shares] = history.series(timeShares);
    const stacked = TIME_PARTS.map((part, i) => shares.map((row) =>
      (row[0] === null ? null : row.slice(0, i + 1).reduce((a, b) => a + b, 0))));
    this.time.draw(times, ...stacked.reverse());
    const overall = timeShares((name) => history.sum(name));
    note("time-note", TIME_PARTS.map((part, i) => [part, overall[i]])
      .filter((each) => each[1] > 0.005)
      .map(([part, share]) => `${part} ${percent(share)}`).join(", "));
  }
}

function note(id, text) { document.getElementById(id).textContent = text; }
