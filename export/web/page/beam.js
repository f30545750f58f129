// Beam search with a length penalty (Wu et al. 2016). The same as mlx_transformer/decoding/beam.py, for one sentence.

import { lengthLimit, penalty } from './limits.js';
import { Rules, startOf } from './rules.js';
import { DEAD, logSumExp } from './sampling.js';

/** The n largest scores of `entries`, best first; the earlier of equals. */
function top(entries, n) {
  return entries.map((entry, i) => [entry, i]).sort((a, b) => b[0].score - a[0].score || a[1] - b[1])
    .slice(0, n).map(([entry]) => entry);
}

/** The C best extensions of all hypotheses: [{score, parent, token}], best first. */
function extensions(logits, live, C, rules) {
  const found = [];
  for (let parent = 0; parent < live.length; parent++) {
    const { ids, score: before } = live[parent];
    const normaliser = logSumExp(logits[parent]);
    const weakened = rules.repetition_penalty === 1 ? logits[parent]
      : rules.weakened(logits[parent].map((logit) => logit - normaliser), ids);
    const base = rules.repetition_penalty === 1 ? before - normaliser : before;
    const row = rules.allowed(weakened, ids);
    const kept = []; // best first
    for (let token = 0; token < row.length; token++) {
      const score = row[token] + base;
      if (score <= DEAD || (kept.length === C && score <= kept.at(-1).score)) continue;
      let at = kept.length;
      while (at > 0 && kept[at - 1].score < score) at--;
      kept.splice(at, 0, { score, parent, token });
      if (kept.length > C) kept.pop();
    }
    found.push(...kept);
  }
  return top(found, C);
}

/** The K best hypotheses: [{ids, score}], without the end token. `heard` is called with the most likely ids so far;
 * `seen` with each step's candidates: {t, candidates, ending, going}, each [{score, parent, token}]. parent is an
 * index into the previous step's `going`. */
export async function beamSearch(model, source, options) {
  const { beam: K, lengthPenalty: alpha, prefix = [], forced = [], stopped, heard, seen = () => {} } = options;
  const { config } = model;
  const { generation } = config;
  const rules = new Rules(config, forced);
  const [limit, C] = [lengthLimit(source, config), K * (1 + rules.ends.size)];
  const weigh = (length) => penalty(length, alpha, generation);
  const first = prefix.length ? prefix : forced;
  const decoder = await model.start(source);
  try {
    const found = await decoder.step([[startOf(config), ...first]]);
    const scored = first.map((id, i) => (i < forced.length ? 0 : found[i][id] - logSumExp(found[i])));
    let live = [{ score: scored.reduce((sum, each) => sum + each, 0), ids: first }];
    let logits = found.slice(-1);
    let finished = [];
    for (let t = first.length; t < limit && !stopped(); t++) {
      const given = rules.given(t, limit);
      const candidates = given === undefined ? extensions(logits, live, C, rules)
        : live.map(({ score }, parent) => ({ score, parent, token: given }));
      const grown = ({ parent, token }) => [...live[parent].ids, token];
      const last = t + 1 >= limit;
      const ending = candidates.slice(0, K).filter(({ token }) => last || rules.ends.has(token));
      const weighed = ending.map((each) => ({ score: each.score / weigh(t + 1), ids: grown(each) }));
      finished = top([...finished, ...weighed], K);
      const going = candidates.filter(({ token }) => !rules.ends.has(token)).slice(0, K);
      seen({ t, candidates, ending, going: last ? [] : going });
      const next = going.map((each) => ({ score: each.score, ids: grown(each) }));
      if (last || !next.length || decided(finished, K, next[0].score, t + 1, { limit, alpha, weigh, ...generation })) break;
      await decoder.reorder(going.map(({ parent }) => parent));
      live = next;
      heard(live[0].ids);
      logits = await decoder.step(live.map(({ ids }) => [ids.at(-1)]));
    }
    return finished.map(({ ids, score }) => ({ ids: rules.ends.has(ids.at(-1)) ? ids.slice(0, -1) : ids, score }));
  } finally {
    decoder.dispose();
  }
}

/** Whether K hypotheses are finished, and no live one can score higher. best: the best live log p. */
function decided(finished, K, best, length, { early_stopping: early, heuristic_stop: heuristic, limit, alpha, weigh }) {
  if (finished.length < K) return false;
  // log p only falls, so a live hypothesis can reach at most its own log p over the largest penalty.
  const ahead = heuristic ? length : alpha >= 0 ? limit : length + 1;
  return early || finished.at(-1).score >= best / weigh(ahead);
}
