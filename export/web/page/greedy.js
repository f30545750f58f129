// Greedy search and sampling, token by token. The same as mlx_transformer/decoding/greedy.py, for one sentence.

import { lengthLimit } from './limits.js';
import { Rules, startOf } from './rules.js';
import { argmax, DEAD, draw, likeliest, logSumExp } from './sampling.js';

/** Yields {id, logProbability} of each new token, those of `prefix` first; the last may be the end token. forced: the
 * first tokens of every output, including the prefix. `stopped` is called before each step. */
export async function* tokens(model, source, { prefix = [], forced = [], stopped = () => false, ...options }) {
  const { config } = model;
  const rules = new Rules(config, forced);
  const limit = lengthLimit(source, config);
  const written = prefix.length ? [...prefix] : [...forced];
  const decoder = await model.start(source);
  try {
    let given = [startOf(config), ...written].slice(0, limit);
    for (let t = written.length; t < limit && !stopped(); t++) {
      const found = await decoder.step([given]);
      for (const [i, id] of given.slice(1).entries()) yield { id, logProbability: scoreOf(found[i], id, i < forced.length) };
      const logits = found.at(-1);
      const allowed = rules.allowed(rules.weakened(logits, written), written);
      const chosen = rules.given(t, limit)
        ?? (options.method === 'sample' ? draw(likeliest(allowed, options), options.seed, t) : argmax(allowed));
      yield { id: chosen, logProbability: scoreOf(logits, chosen, rules.given(t, limit) !== undefined) };
      if (rules.ends.has(chosen)) return;
      written.push(chosen);
      given = [chosen];
    }
  } finally {
    decoder.dispose();
  }
}

const scoreOf = (logits, id, free) => (free ? 0 : logits[id] - logSumExp(logits));

/** The most likely next tokens after a prefix: [{id, probability}]. */
export async function alternatives(model, source, prefix, forced, count) {
  const { config } = model;
  const rules = new Rules(config, forced);
  const decoder = await model.start(source);
  const written = prefix.length ? prefix : forced;
  try {
    const logits = (await decoder.step([[startOf(config), ...written]])).at(-1);
    const [total, allowed] = [logSumExp(logits), rules.allowed(logits, written)];
    const ids = Array.from(logits.keys()).filter((id) => allowed[id] > DEAD && !rules.ends.has(id));
    ids.sort((a, b) => logits[b] - logits[a] || a - b);
    return ids.slice(0, count).map((id) => ({ id, probability: Math.exp(logits[id] - total) }));
  } finally {
    decoder.dispose();
  }
}
