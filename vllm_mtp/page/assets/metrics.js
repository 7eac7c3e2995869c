"use strict";
// What the server's /metrics says of speculation, and how it changes.

const WINDOW_MS = 5 * 60 * 1000;
const LINE = /^vllm_mtp:(\w+?)(?:_total)?\{(.*)\} (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const OWN_LABELS = ["position", "draft_length", "part"];

// Sums over engines: name, then our label's value ("" without one), then the number.
function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const [, name, labels, value] = match;
    if (name.endsWith("_created")) continue;
    let own = "";
    for (const [, label, content] of labels.matchAll(LABEL)) {
      if (OWN_LABELS.includes(label)) own = content;
    }
    const series = (found[name] ??= {});
    series[own] = (series[own] ?? 0) + Number(value);
  }
  return found;
}

class History {
  constructor() { this.samples = []; }

  get isEmpty() { return this.samples.length < 2; }

  add(timeMs, metrics) {
    const last = this.samples.at(-1);
    const count = (each) => each.metrics.decode_tokens?.[""] ?? 0;
    const sample = { timeMs, metrics };
    if (last && count(sample) < count(last)) this.samples = []; // another server
    this.samples.push(sample);
    while (this.samples[0].timeMs < timeMs - WINDOW_MS) this.samples.shift();
  }

  // What was added to a counter, by label, between two samples.
  static difference(before, after, name) {
    const earlier = before.metrics[name] ?? {};
    return Object.fromEntries(Object.entries(after.metrics[name] ?? {}).map(
      ([label, value]) => [label, value - (earlier[label] ?? 0)]));
  }

  // Over the whole window.
  sum(name) {
    return History.difference(this.samples[0], this.samples.at(-1), name);
  }

  // A number for each pair of neighbours, with its time in seconds.
  series(calculate) {
    const times = [], values = [];
    for (let i = 1; i < this.samples.length; i++) {
      const [before, after] = [this.samples[i - 1], this.samples[i]];
      times.push(after.timeMs / 1000);
      values.push(calculate((name) => History.difference(before, after, name)));
    }
    return [times, values];
  }
}

const TIME_PARTS = ["target", "verify", "draft", "whole", "prefill"];

// Tokens a second of the steps that only decode; null where there were none.
function goodput(difference) {
  const seconds = Object.entries(difference("step_seconds"))
    .reduce((sum, [part, value]) => sum + (part === "prefill" ? 0 : value), 0);
  return seconds > 0 ? (difference("decode_tokens")[""] ?? 0) / seconds : null;
}

// Share of step time of each part.
function timeShares(difference) {
  const seconds = difference("step_seconds");
  const all = TIME_PARTS.reduce((sum, part) => sum + (seconds[part] ?? 0), 0);
  return TIME_PARTS.map((part) => (all > 0 ? (seconds[part] ?? 0) / all : null));
}

// Accepted of those verified, by position.
function acceptanceByPosition(drafted, accepted) {
  return Object.keys(drafted).map(Number).sort((a, b) => a - b)
    .filter((position) => drafted[position] > 0)
    .map((position) => [position + 1, (accepted[position] ?? 0) / drafted[position]]);
}

// Share of request-steps by K.
function sharesByLength(steps) {
  const all = Object.values(steps).reduce((a, b) => a + b, 0);
  return Object.keys(steps).map(Number).sort((a, b) => a - b)
    .map((length) => [length, all > 0 ? steps[length] / all : 0]);
}
