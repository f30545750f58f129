// Temperature, top-k, nucleus and a draw. The same as in mlx_transformer/decoding/greedy.py, for one sentence.

import { gumbel } from './philox.js';

export const BANNED = -1e9;
export const DEAD = BANNED / 2;
const BLOCK = 128;

export function logSumExp(values, begin = 0, end = values.length) {
  let largest = -Infinity;
  for (let i = begin; i < end; i++) largest = Math.max(largest, values[i]);
  let sum = 0;
  for (let i = begin; i < end; i++) sum += Math.exp(values[i] - largest);
  return largest + Math.log(sum);
}

/** The first index of the largest value. */
export function argmax(values, begin = 0, end = values.length) {
  let best = begin;
  for (let i = begin + 1; i < end; i++) if (values[i] > values[best]) best = i;
  return best;
}

/** Scores at the temperature, BANNED outside the topK most likely (0: all) and the nucleus topP. */
export function likeliest(logits, { temperature, topK, topP }) {
  const scores = logits.map((logit) => logit / temperature);
  const few = topK > 0 && topK < scores.length;
  if (!few && topP >= 1) return scores;
  const falling = scores.slice().sort().reverse().subarray(0, topK > 0 ? topK : undefined);
  let floor = falling.at(-1);
  if (topP < 1) {
    const total = logSumExp(falling);
    let [before, last] = [0, 0];
    for (let i = 0; i < falling.length && before < topP; i++) {
      last = i;
      before += Math.exp(falling[i] - total);
    }
    floor = falling[last];
  }
  return scores.map((score) => (score < floor ? BANNED : score));
}

/** Draw a token from softmax(scores) with Gumbel noise: first a block of the vocabulary, then a token in it. */
export function draw(scores, seed, t) {
  const blocks = Math.ceil(scores.length / BLOCK);
  const noise = gumbel(seed, t, BLOCK + blocks);
  const sums = Float32Array.from({ length: blocks }, (_, b) => (
    logSumExp(scores, b * BLOCK, Math.min(scores.length, (b + 1) * BLOCK)) + noise[BLOCK + b]
  ));
  const begin = argmax(sums) * BLOCK;
  return begin + argmax(scores.subarray(begin, begin + BLOCK).map((score, i) => score + noise[i]));
}
