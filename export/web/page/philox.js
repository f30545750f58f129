// The noise of mlx_transformer/decoding/greedy.py: Philox4x32-10 (Salmon et al. 2011). The same seed draws the same
// tokens here and in Python.

const ROUNDS = 10;
const MULTIPLIERS = [0xd2511f53n, 0xcd9e8d57n];
const WEYL = [0x9e3779b9, 0xbb67ae85];

function product(a, b) {
  const wide = a * BigInt(b);
  return [Number(wide >> 32n), Number(wide & 0xffffffffn)];
}

function philox([x0, y0, x1, y1], seed) {
  let [k0, k1] = [Number(seed & 0xffffffffn), Number(seed >> 32n)];
  for (let round = 0; round < ROUNDS; round++) {
    const [high0, low0] = product(MULTIPLIERS[0], x0);
    const [high1, low1] = product(MULTIPLIERS[1], x1);
    [x0, y0, x1, y1] = [(high1 ^ y0 ^ k0) >>> 0, low1, (high0 ^ y1 ^ k1) >>> 0, low0];
    [k0, k1] = [(k0 + WEYL[0]) >>> 0, (k1 + WEYL[1]) >>> 0];
  }
  return [x0, y0, x1, y1];
}

/** Gumbel noise for new token number t of a single sentence: `count` numbers. seed: a BigInt below 2^64. */
export function gumbel(seed, t, count) {
  const noise = new Float32Array(Math.ceil(count / 4) * 4);
  for (let counter = 0; counter * 4 < count; counter++) {
    philox([counter, t, 0, 0], seed).forEach((word, i) => {
      const uniform = Math.fround(Math.fround((word >>> 9) + 0.5) * 2 ** -23);
      noise[counter * 4 + i] = -Math.log(Math.fround(-Math.log(uniform)));
    });
  }
  return noise;
}
