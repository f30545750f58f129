// The rest of a layer: residual sum, norm, feed-forward net; and layer after layer.

import { derived, escaped, number, products, short, strip, sum, table } from '../../../mlx_transformer/page/kit.js';

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** X, Z, X + Z, and LayerNorm step by step, for a sub-layer. Z is a norm of what came out if there is one behind it. */
function addAndNorm(v, part) {
  const { shape, pass, l, i } = v;
  const name = `${shape.layer(l)}.${part}`;
  const [stream, summed, normed] = [shape.stream(l, part), `${name}.residual`, `${name}_norm`];
  const behind = pass.has(`${name}_post_norm`);
  const out = behind ? `${name}_post_norm` : name;
  const [x, z] = [pass.row(stream, i), pass.has(out) ? pass.row(out, i) : null];
  const c = v.c % shape.d;
  const factor = pass.config.residual_scale;
  const total = pass.row(summed, i);
  const off = v.off.residual ? '<p class="off">Residuals are switched off: X is not added.</p>' : '';
  const adding = off + strip('X, what went in', x, { point: stream, index: i, lit: c })
    + (z ? strip(behind ? 'Z, its norm' : 'Z, what came out', z, { point: out, index: i, lit: c }) : '')
    + strip(v.off.residual ? 'Z alone' : factor ? `X + ${factor} Z` : 'X + Z', total, { point: summed, index: i, lit: c })
    + (z ? `<p class="cell">column ${c}: ${v.off.residual ? '' : `${number(x[c], stream, `${i},${c}`)} + `}${factor ? `${factor} × ` : ''}${number(z[c], out, `${i},${c}`)} = ${number(total[c], summed, `${i},${c}`)}</p>` : '');
  const norming = pass.has(normed) ? normSteps(v, shape.post ? total : x, normed, c) : '';
  const between = behind && pass.has(name) ? normSteps(v, pass.row(name, i), out, c) : '';
  return shape.post ? adding + norming : norming + between + adding;
}

export function normSteps(v, read, normed, c) {
  const { shape, pass, i } = v;
  const out = pass.row(normed, i);
  if (v.off.norm) return '<p class="off">Norms are switched off: the sum goes on as it is.</p>' + strip('goes on', out, { point: normed, index: i, lit: c });
  const mu = shape.rms ? 0 : mean(read);
  const sigma = Math.sqrt(mean(read.map((x) => (x - mu) ** 2)) + pass.epsilon);
  const [gamma, beta] = [v.parameter(`${normed}.weight`), v.parameter(`${normed}.bias`)];
  const centred = read.map((x) => x - mu);
  const scaled = centred.map((x) => x / sigma);
  const [m, s] = [derived(mu, 'mean'), derived(sigma, 'deviation')];
  const lines = [
    `<p class="cell">${shape.rms ? 'root of the mean square' : `mean μ = ${m}, standard deviation σ`} = ${s} of these ${read.length} numbers</p>`,
    shape.rms ? '' : strip('− μ', centred, { lit: c }),
    strip('÷ σ', scaled, { lit: c }),
    gamma ? strip('γ, learned', gamma, { lit: c }) : '',
    beta ? strip('β, learned', beta, { lit: c }) : '',
    strip('the norm: · γ + β', out, { point: normed, index: i, lit: c }),
  ];
  if (gamma) {
    lines.push(`<p class="cell">column ${c}: (${derived(read[c], 'read')} − ${m}) ÷ ${s} = ${derived(scaled[c], 'scaled')}; × ${derived(gamma[c], 'gamma')}`
      + `${beta ? ` + ${derived(beta[c], 'beta')}` : ''} = ${number(out[c], normed, `${i},${c}`)}</p>`);
  }
  return lines.join('');
}

const PLACED = {
  post: 'LayerNorm(X + Z)',
  pre: 'X + Sublayer(LayerNorm(X)); LayerNorm',
  sandwich: 'X + LayerNorm(Sublayer(LayerNorm(X))); LayerNorm',
  after: 'X + LayerNorm(Sublayer(X)); LayerNorm',
};

export const norm = {
  id: 'norm',
  formula: (v) => (v.shape.rms ? `${PLACED[v.pass.config.norm_placement].replaceAll('Layer', 'RMS')}: x / √(mean x² + ε) · γ`
    : `${PLACED[v.pass.config.norm_placement]}: (x − μ) / √(σ² + ε) · γ + β`),
  body: (v) => addAndNorm(v, 'self_attention'),
};

const FORMULAS = { relu: 'max(0, x W<sub>1</sub> + b<sub>1</sub>) W<sub>2</sub> + b<sub>2</sub>' };

export const feedForward = {
  id: 'feed-forward',
  formula: (v) => (v.shape.gated ? `FFN(x) = (${v.shape.activation}(x W<sub>g</sub>) · x W<sub>1</sub>) W<sub>2</sub>`
    : `FFN(x) = ${FORMULAS[v.shape.activation] ?? `${v.shape.activation}(x W<sub>1</sub> + b<sub>1</sub>) W<sub>2</sub> + b<sub>2</sub>`}`),
  body(v) {
    const { shape, pass, l, i } = v;
    const name = `${shape.layer(l)}.feed_forward`;
    const input = shape.input(l, 'feed_forward');
    const x = pass.row(input, i);
    const inner = pass.row(`${name}.inner`, i);
    const up = pass.has(`${name}.up_proj`) ? pass.row(`${name}.up_proj`, i) : null;
    const out = pass.has(name) ? pass.row(name, i) : null;
    const zeros = inner.filter((u) => u === 0).length;
    const down = v.weights?.[`${name}.down_proj.weight`];
    const force = Array.from(inner, (u, k) => {
      if (!down) return Math.abs(u);
      let size = 0;
      for (let r = 0; r < shape.d; r++) size += down[r * inner.length + k] ** 2;
      return Math.abs(u) * Math.sqrt(size);
    });
    const first = [...force.keys()].sort((a, b) => force[b] - force[a]).slice(0, 5);
    const off = v.sublayerOff('feed_forward') ? '<p class="off">This sub-layer is switched off: it adds 0.</p>' : '';
    const lines = [off, strip('x, what goes in', x, { point: input, index: i })];
    if (up) lines.push(strip(`x W<sub>1</sub> + b<sub>1</sub>, ${up.length} units`, up, { point: `${name}.up_proj`, index: i, lit: first[0] }));
    if (pass.has(`${name}.gate_proj`)) lines.push(strip('the gate, before the bend', pass.row(`${name}.gate_proj`, i), { point: `${name}.gate_proj`, index: i, lit: first[0] }));
    lines.push(strip('inner', inner, { point: `${name}.inner`, index: i, lit: first[0], kind: 'inner' }));
    lines.push(`<p class="said">${zeros} of ${inner.length} units are 0 (${derived((100 * zeros) / inner.length, 'zeros', 2)} %). Those that write most: ${first.map((k) => `unit ${k} (${number(inner[k], `${name}.inner`, `${i},${k}`)})`).join(', ')}.</p>`);
    if (v.weights && up) {
      const k = first[0];
      const w = v.weights[`${name}.up_proj.weight`].subarray(k * shape.d, (k + 1) * shape.d);
      const bias = v.weights[`${name}.up_proj.bias`];
      lines.push(`<p class="cell">unit ${k}:</p>${sum([...products(x, w), ...(bias ? [['b<sub>1</sub>', bias[k]]] : [])],
        `${number(up[k], `${name}.up_proj`, `${i},${k}`)}, through ${escaped(shape.activation)}${shape.gated ? ' and the gate' : ''}: ${number(inner[k], `${name}.inner`, `${i},${k}`)}`)}`);
    }
    if (out) lines.push(strip('times W<sub>2</sub> + b<sub>2</sub>', out, { point: name, index: i, lit: v.c }));
    return `${lines.join('')}<h3>and again + x, norm</h3>${addAndNorm(v, 'feed_forward')}`;
  },
};

/** The share of a stack's vectors that differs between positions: ‖X − mean‖ / ‖X‖. */
function apart(v, name) {
  const { data, shape } = v.pass.points[name];
  const d = shape.at(-1);
  const n = data.length / d;
  const middle = Array.from({ length: d }, (_, j) => mean(Array.from({ length: n }, (__, r) => data[r * d + j])));
  let [differs, all] = [0, 0];
  data.forEach((x, at) => { differs += (x - middle[at % d]) ** 2; all += x * x; });
  return Math.sqrt(differs / all);
}

export const next = {
  id: 'next',
  formula: () => 'x → layer 1 → layer 2 → …',
  body(v) {
    const names = [v.shape.embedding(), ...Array.from({ length: v.shape.layers }, (_, n) => v.shape.layer(n))];
    if (!v.shape.post && v.pass.has(`${v.stack}.norm`)) names.push(`${v.stack}.norm`);
    const said = (name, n) => (n === 0 ? 'embedding' : name.endsWith('.norm') ? 'last norm' : `after layer ${n}`);
    const strips = names.map((name, n) => strip(said(name, n), v.pass.row(name, v.i), { point: name, index: v.i, lit: v.c }));
    const whole = names.every((name) => !v.pass.points[name].rows);
    const rows = names.map((name, n) => [said(name, n), whole ? derived(apart(v, name), `apart ${n}`) : '',
      derived(Math.hypot(...v.pass.row(name, v.i)), `length ${n}`)]);
    return strips.join('') + table(['', 'share that tells positions apart', 'length of this vector'], rows, { label: 'layer after layer' });
  },
};
