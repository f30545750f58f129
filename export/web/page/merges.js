// Byte-pair encoding (Sennrich et al. 2016): letters to tokens by pairs that were learned.

/** A function from letters to ids. ids: a Map of tokens. merges: pairs of tokens, the first learned one first. A letter
 * without an id stays apart and is given as it is. */
export function merger(ids, merges) {
  const ranks = new Map(merges.map((pair, rank) => [Array.isArray(pair) ? pair.join(' ') : pair, rank]));
  return (letters) => {
    const parts = [...letters];
    for (;;) { // the merge that was learned first, again and again, the leftmost of equal ones
      let [best, at] = [Infinity, -1];
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = ranks.get(`${parts[i]} ${parts[i + 1]}`);
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return parts.map((part) => ids.get(part) ?? part);
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  };
}
