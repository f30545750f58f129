// Greedy search and sampling, token by token. As mlx_transformer/generation/greedy.py, for one sentence.

import { banned, lengthLimit } from './limits.js';
import { argmax, BANNED, draw, likeliest, logSumExp } from './sampling.js';

/** Yields {id, logProbability} of each new token, those of `prefix` first; the last may be the end. `stopped` is asked
 * before each step. */
export async function* tokens(model, source, { prefix = [], stopped = () => false, ...options }) {
  const { config } = model;
  const limit = lengthLimit(source, config);
  const decoder = await model.start(source);
  try {
    let given = [config.bos_id, ...prefix].slice(0, limit);
    for (let t = prefix.length; t < limit && !stopped(); t++) {
      const found = await decoder.step([given]);
      for (const [i, id] of given.slice(1).entries()) yield { id, logProbability: found[i][id] - logSumExp(found[i]) };
      const logits = found.at(-1);
      const logProbability = -logSumExp(logits);
      const chosen = options.method === 'sample' ? drawn(logits, options, t, config) : best(logits, config);
      yield { id: chosen, logProbability: logProbability + logits[chosen] };
      if (chosen === config.eos_id) return;
      given = [chosen];
    }
  } finally {
    decoder.dispose();
  }
}

/** The likeliest next tokens after a prefix: [{id, probability}]. */
export async function alternatives(model, source, prefix, count) {
  const { config } = model;
  const decoder = await model.start(source);
  try {
    const logits = (await decoder.step([[config.bos_id, ...prefix]])).at(-1);
    const total = logSumExp(logits);
    const allowed = Array.from(logits.keys()).filter((id) => !banned(config).includes(id) && id !== config.eos_id);
    allowed.sort((a, b) => logits[b] - logits[a] || a - b);
    return allowed.slice(0, count).map((id) => ({ id, probability: Math.exp(logits[id] - total) }));
  } finally {
    decoder.dispose();
  }
}

function drawn(logits, options, t, config) {
  const allowed = Float32Array.from(logits);
  for (const id of banned(config)) allowed[id] = BANNED;
  return draw(likeliest(allowed, options), options.seed, t);
}

function best(logits, config) {
  const allowed = Float32Array.from(logits);
  for (const id of banned(config)) allowed[id] = BANNED;
  return argmax(allowed);
}
