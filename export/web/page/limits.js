// Length limits and the length penalty, as in mlx_transformer/decoding/options.py.

const EXTRA_TOKENS = 50;

/** Most new tokens, with the end token. Throws if the text is too long for the model. */
export function lengthLimit(source, { max_positions: most, generation }) {
  if (source.length > most) {
    throw new RangeError(`The text has ${source.length} tokens; the model takes at most ${most}: shorten it.`);
  }
  const { max_new_tokens: limit, max_length_factor: factor, min_new_tokens: least } = generation;
  if (limit) return Math.min(limit, most);
  const usual = factor ? Math.ceil(Math.fround(source.length * Math.fround(factor))) : source.length + EXTRA_TOKENS;
  return Math.max(Math.min(usual, most), least);
}

/** The length penalty for a number of tokens: ((k + n) / (k + 1)) ** alpha, k = 5 in Wu et al. 2016. */
export const penalty = (length, alpha, { penalty_offset: k }) => ((k + length) / (k + 1)) ** alpha;
