// Byte-pair encoding (Sennrich et al. 2016): merge letters into tokens by learned pairs.

/** Returns a function from letters to ids. ids: a Map of tokens. merges: pairs of tokens, first learned first. A
 * letter without an id isn't merged and is returned itself. */
export function merger(ids, merges) {
  const ranks = new Map(merges.map((pair, rank) => [Array.isArray(pair) ? pair.join(' ') : pair, rank]));
  return (letters) => {
    const parts = [...letters];
    for (;;) { // repeat the earliest learned merge; of equals, the leftmost
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
