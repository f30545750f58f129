// Attention between words instead of tokens.

/** The end index of each of `words` [{text, at}]; the last ends at `length`. */
const ends = (words, length) => words.map((_, i) => words[i + 1]?.at ?? length);

/** For each output word, its attention to each source word; the last share is the source's end (the last `tail`
 * tokens). weights: an array of S shares per output token. Shares of a source word's tokens are added, rows of an
 * output word's tokens averaged. */
export function byWords(weights, source, output, tail = 1) {
  const S = weights[0].length;
  const columns = [...ends(source, S - tail), S];
  const summed = weights.map((row) => columns.map((end, i) => {
    let sum = 0;
    for (let at = i ? columns[i - 1] : 0; at < end; at++) sum += row[at];
    return sum;
  }));
  const rows = ends(output, weights.length);
  return rows.map((end, i) => {
    const tokens = summed.slice(i ? rows[i - 1] : 0, end);
    return columns.map((_, j) => tokens.reduce((sum, row) => sum + row[j], 0) / tokens.length);
  });
}

/** The first rows of a tensor (..., T, S): `count` arrays of S numbers. */
export function rowsOf(tensor, count) {
  const S = tensor.dims.at(-1);
  return Array.from({ length: count }, (_, i) => Array.from(tensor.data.subarray(i * S, (i + 1) * S)));
}
