"use strict";
// Tokens per round, in closed form and simulated.

const MAX_K = 16;

function tokensPerRound(p, k) {
  return p === 1 ? k + 1 : (1 - p ** (k + 1)) / (1 - p);
}

// The same numbers every time (mulberry32), so that a slider moved back shows the same.
function randomNumbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

function simulatedMean(p, k, numRounds) {
  const random = randomNumbers(k + 1);
  let numTokens = 0;
  for (let i = 0; i < numRounds; i++) {
    let accepted = 0;
    while (accepted < k && random() < p) accepted++;
    numTokens += accepted + 1;
  }
  return numTokens / numRounds;
}

const WORDS = ("a round drafts some tokens and the target reads them all at once it keeps " +
  "what it would have said and says the next token itself so the text stays the same " +
  "only sooner").split(" ");
const WRONG = "the is of to in for".split(" ");

// Data of a request, as the server sends it.
function simulatedRequest(p, k, numRounds) {
  const random = randomNumbers(7), rounds = [];
  let place = 0;
  const word = (offset) => " " + WORDS[(place + offset) % WORDS.length];
  for (let i = 0; i < numRounds; i++) {
    let accepted = 0;
    while (accepted < k && random() < p) accepted++;
    const draft = [];
    for (let j = 0; j < k; j++) {
      draft.push(j < accepted ? word(j) : " " + WRONG[(place + j) % WRONG.length]);
    }
    rounds.push({ draft, num_accepted: accepted, next: word(accepted),
      num_committed: accepted + 1 });
    place += accepted + 1;
  }
  return { name: "Simulation", has_ended: true, prompt: "", num_prompt_tokens: 0,
    num_left_out: 0, rounds };
}

// Mean tokens of a request's rounds by K; nothing where there was no such round.
function measuredMeans(rounds) {
  const sums = Array.from({ length: MAX_K + 1 }, () => [0, 0]);
  for (const each of rounds) {
    const sum = sums[each.draft.length];
    if (sum === undefined) continue;
    sum[0] += each.num_accepted + 1;
    sum[1] += 1;
  }
  return sums.map(([tokens, number]) => (number ? tokens / number : null));
}

// How often a draft token was accepted of those that were decided about.
function measuredProbability(rounds) {
  let accepted = 0, decided = 0;
  for (const each of rounds) {
    accepted += each.num_accepted;
    decided += Math.min(each.num_accepted + 1, each.draft.length);
  }
  return decided ? accepted / decided : null;
}
