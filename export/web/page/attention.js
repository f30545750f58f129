// What attention read, told in words in the place of tokens.

/** Where each of `words` [{text, at}] ends, the last at `length`. */
const ends = (words, length) => words.map((_, i) => words[i + 1]?.at ?? length);

/** Shares of the source's words, the last being its end (the last `tail` tokens), for each word of the output. weights:
 * an array of S shares for each token. A word of the source has the sum of its tokens' shares, one of the output their
 * mean. */
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
