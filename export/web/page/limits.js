// How long a translation may become, what is never generated, and how a length is weighed: as in
// mlx_transformer/generation/options.py.

const EXTRA_TOKENS = 50;

/** Most new tokens, the end counted. Throws a line for a text that is too long for the model. */
export function lengthLimit(source, config) {
  if (source.length > config.max_positions) {
    throw new RangeError(`The text has ${source.length} tokens; the model takes at most ${config.max_positions}: shorten it.`);
  }
  return Math.min(source.length + EXTRA_TOKENS, config.max_positions);
}

/** lp(n) of Wu et al. 2016, by which log p is divided. */
export const penalty = (length, alpha) => ((5 + length) / 6) ** alpha;

/** Ids that are never generated: BART's decoder starts with the end, which is. */
export const banned = (config) => [config.pad_id, config.bos_id].filter((id) => id !== config.eos_id);
