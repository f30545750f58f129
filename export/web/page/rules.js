// Allowed and forced tokens: `Rules` of mlx_transformer/decoding/steps.py, for one sentence.

import { BANNED } from './sampling.js';

/** The decoder's start token: a language's in mBART, otherwise the model's own. */
export const startOf = (config) => config.start_id ?? config.bos_id;

export class Rules {
  /** config: from site.json. forced: the first tokens of every output. */
  constructor(config, forced) {
    const { pad_id: pad, bos_id: bos, eos_id: end, generation } = config;
    Object.assign(this, { forced, start: startOf(config), end, ...generation });
    this.ends = new Set([end, ...generation.end_ids]);
    // BART's decoder starts with the end token, which must stay allowed.
    this.never = [...[pad, bos].filter((id) => id !== end), ...generation.suppressed];
  }

  /** Scores with the repetition penalty on tokens already written: logits, or log p in beam search. */
  weakened(scores, written) {
    const factor = this.repetition_penalty;
    if (factor === 1) return scores;
    const found = Float32Array.from(scores);
    for (const id of new Set([this.start, ...written])) found[id] = scores[id] < 0 ? scores[id] * factor : scores[id] / factor;
    return found;
  }

  /** The scores of the token after `written`, with BANNED on forbidden ones. */
  allowed(scores, written) {
    const found = Float32Array.from(scores);
    const t = written.length;
    const banned = [...this.never, ...this.#repeated(written), ...this.#sequences(written)];
    if (t < this.min_new_tokens) banned.push(...this.ends);
    if (t === this.forced.length) banned.push(...this.suppressed_first);
    for (const id of banned) found[id] += BANNED;
    return found;
  }

  /** The forced token number t; undefined if it is free. */
  given(t, limit) {
    return this.forced[t] ?? (this.forced_end && t + 1 === limit ? this.end : undefined);
  }

  /** Tokens that would repeat the last n-gram. */
  #repeated(written) {
    const [n, all] = [this.no_repeat_ngram, [this.start, ...written]];
    if (!n || all.length < n) return [];
    const last = all.slice(all.length - n + 1).join();
    return all.slice(n - 1).filter((_, i) => n === 1 || all.slice(i, i + n - 1).join() === last);
  }

  #sequences(written) {
    const all = [this.start, ...written];
    return this.banned_sequences.filter((ids) => {
      const before = ids.slice(0, -1);
      return before.length <= all.length && before.join() === all.slice(all.length - before.length).join();
    }).map((ids) => ids.at(-1));
  }
}
