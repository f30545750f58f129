// Layers for twin.js: pure functions of float64 arrays. A matrix is its rows, one after another.

/** x W^T + b: x (L, n), W (m, n), b (m) or none -> (L, m). */
export function linear(x, W, b, n) {
  const m = W.length / n;
  const L = x.length / n;
  const y = new Float64Array(L * m);
  for (let i = 0; i < L; i++) {
    for (let j = 0; j < m; j++) {
      let sum = 0;
      for (let k = 0; k < n; k++) sum += x[i * n + k] * W[j * n + k];
      y[i * m + j] = b ? sum + b[j] : sum;
    }
  }
  return y;
}

export const sum = (x, y) => x.map((value, i) => value + y[i]);

/** LayerNorm, or RMSNorm if not centring, over rows of n numbers. */
export function norm(x, gamma, beta, epsilon, centred) {
  const n = gamma.length;
  const y = new Float64Array(x.length);
  for (let from = 0; from < x.length; from += n) {
    const row = x.subarray(from, from + n);
    const mean = centred ? row.reduce((total, value) => total + value, 0) / n : 0;
    const variance = row.reduce((total, value) => total + (value - mean) ** 2, 0) / n;
    const deviation = Math.sqrt(variance + epsilon);
    for (let k = 0; k < n; k++) y[from + k] = (row[k] - mean) / deviation * gamma[k] + (beta ? beta[k] : 0);
  }
  return y;
}

/** Softmax of each row of n scores, shifted by the largest to avoid overflow. */
export function softmax(scores, n) {
  const weights = new Float64Array(scores.length);
  for (let from = 0; from < scores.length; from += n) {
    const row = scores.subarray(from, from + n);
    const largest = row.reduce((most, score) => Math.max(most, score), -Infinity);
    let total = 0;
    for (let k = 0; k < n; k++) total += weights[from + k] = Math.exp(row[k] - largest);
    for (let k = 0; k < n; k++) weights[from + k] /= total;
  }
  return weights;
}

/** (L, H d) -> (H, L, d) */
export function split(x, heads, d) {
  const L = x.length / (heads * d);
  const y = new Float64Array(x.length);
  for (let h = 0; h < heads; h++) {
    for (let i = 0; i < L; i++) {
      const from = (i * heads + h) * d;
      y.set(x.subarray(from, from + d), (h * L + i) * d);
    }
  }
  return y;
}

/** (H, L, d) -> (L, H d) */
export function merge(x, heads, d) {
  return split(x, x.length / (heads * d), d); // the same swap of two axes
}

/** For each of `heads`, the rows of both: (H, P, n), (H, L, n) -> (H, P + L, n). */
export function append(past, recent, heads) {
  if (!past.length) return recent;
  const [old, added] = [past.length / heads, recent.length / heads];
  const y = new Float64Array(past.length + recent.length);
  for (let h = 0; h < heads; h++) {
    y.set(past.subarray(h * old, (h + 1) * old), h * (old + added));
    y.set(recent.subarray(h * added, (h + 1) * added), h * (old + added) + old);
  }
  return y;
}

/** erf(x) = 2/sqrt(pi) exp(-x^2) sum 2^n x^(2n+1) / (2n+1)!!, whose terms are all positive; beyond 6 it is 1 in
 * float64. */
function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  let [term, total] = [size, 0];
  for (let n = 1; total + term !== total; n++) {
    total += term;
    term *= 2 * size * size / (2 * n + 1);
  }
  return Math.sign(x) * 2 / Math.sqrt(Math.PI) * Math.exp(-size * size) * total;
}

const tanhGelu = (x) => x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))) / 2;

/** Activations by the config's names. */
export const ACTIVATIONS = {
  relu: (x) => Math.max(x, 0),
  gelu: (x) => x * (1 + erf(x / Math.SQRT2)) / 2,
  gelu_tanh: tanhGelu,
  silu: (x) => x / (1 + Math.exp(-x)),
};

/** Section 3.5: each column's wave at a position, (d), in float32 as in models. */
export function sinusoid(position, d, layout) {
  const half = d / 2;
  const PE = new Float64Array(d);
  for (let j = 0; j < half; j++) {
    const exponent = layout === 'sinusoidal_concat' ? -j / (half - 1) : -2 * j / d;
    const angle = position * 10000 ** exponent;
    const [sine, cosine] = layout === 'sinusoidal' ? [2 * j, 2 * j + 1] : [j, half + j];
    PE[sine] = Math.fround(Math.sin(angle));
    PE[cosine] = Math.fround(Math.cos(angle));
  }
  return PE;
}
