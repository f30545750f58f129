// Beam search with the length penalty of Wu et al. 2016. As mlx_transformer/generation/beam.py, for one sentence.

import { banned, lengthLimit, penalty } from './limits.js';
import { BANNED, logSumExp } from './sampling.js';

const DEAD = BANNED / 2;

/** The n largest scores of `entries`, falling, the first on ties. */
function top(entries, n) {
  return entries.map((entry, i) => [entry, i]).sort((a, b) => b[0].score - a[0].score || a[1] - b[1])
    .slice(0, n).map(([entry]) => entry);
}

/** Of each hypothesis the 2K best extensions; of all of them the 2K best: [{score, parent, token}]. */
function extensions(logits, live, K, config) {
  const never = new Set(banned(config));
  const found = [];
  for (let parent = 0; parent < live.length; parent++) {
    const row = logits[parent];
    const base = live[parent].score - logSumExp(row);
    const kept = []; // falling
    for (let token = 0; token < row.length; token++) {
      const score = row[token] + base;
      if (never.has(token) || (kept.length === 2 * K && score <= kept.at(-1).score)) continue;
      let at = kept.length;
      while (at > 0 && kept[at - 1].score < score) at--;
      kept.splice(at, 0, { score, parent, token });
      if (kept.length > 2 * K) kept.pop();
    }
    found.push(...kept);
  }
  return top(found, 2 * K);
}

/** The K best hypotheses: [{ids, score}], ids without the end. `heard` is called with the likeliest ids so far, `seen`
 * with what each step weighs: {t, candidates, ending, going}, each [{score, parent, token}], parent a place in the last `going`. */
export async function beamSearch(model, source, { beam: K, lengthPenalty, prefix = [], stopped, heard, seen = () => {} }) {
  const { config } = model;
  const limit = lengthLimit(source, config);
  const decoder = await model.start(source);
  try {
    let found = await decoder.step([[config.bos_id, ...prefix]]);
    const forced = prefix.reduce((sum, id, i) => sum + found[i][id] - logSumExp(found[i]), 0);
    let live = [{ score: forced, ids: prefix }];
    let logits = found.slice(-1);
    let finished = [];
    for (let t = prefix.length; t < limit && !stopped(); t++) {
      const candidates = extensions(logits, live, K, config);
      const grown = ({ parent, token }) => [...live[parent].ids, token];
      const last = t + 1 >= limit;
      const ending = candidates.slice(0, K).filter(({ token, score }) => (last || token === config.eos_id) && score > DEAD);
      const weighed = ending.map((each) => ({ score: each.score / penalty(t + 1, lengthPenalty), ids: grown(each) }));
      finished = top([...finished, ...weighed], K);
      const going = candidates.filter(({ token }) => token !== config.eos_id).slice(0, K);
      seen({ t, candidates, ending, going: last ? [] : going });
      const next = going.map((each) => ({ score: each.score, ids: grown(each) }));
      // log p only falls: nothing that is live can reach more than its own over the largest penalty.
      const ahead = penalty(lengthPenalty >= 0 ? limit : t + 2, lengthPenalty);
      if (last || (finished.length === K && finished.at(-1).score >= next[0].score / ahead)) break;
      await decoder.reorder(going.map(({ parent }) => parent));
      live = next;
      heard(live[0].ids);
      logits = await decoder.step(live.map(({ ids }) => [ids.at(-1)]));
    }
    return finished.map(({ ids, score }) => ({ ids: ids.at(-1) === config.eos_id ? ids.slice(0, -1) : ids, score }));
  } finally {
    decoder.dispose();
  }
}
