// From text to the first layer's input: token, embedding row, position.

import { derived, escaped, fold, number, short, strip, table } from '../../../mlx_transformer/page/kit.js';

export const SINUSOIDS = ['sinusoidal', 'sinusoidal_halves', 'sinusoidal_concat'];

/** The angle per position in column j of the sinusoids, and whether it is a cosine. */
export function wave(config, j) {
  const d = config.d_model;
  const half = Math.floor(d / 2);
  const kind = config.positions;
  const pair = kind === 'sinusoidal' ? Math.floor(j / 2) : j % half;
  const cosine = kind === 'sinusoidal' ? j % 2 === 1 : j >= half;
  const speed = kind === 'sinusoidal_concat' ? 10000 ** (-pair / Math.max(1, half - 1)) : 10000 ** ((-2 * pair) / d);
  return { speed, cosine, at: (p) => (cosine ? Math.cos : Math.sin)(p * speed) };
}

export const token = {
  id: 'token',
  formula: () => 'text → pieces → ids',
  body(v) {
    const tokens = v.ids.map((id, n) => `<button type="button" class="chip${n === v.i ? ' on' : ''}" data-word="${n}"><span class="tok">${escaped(v.read[n])}</span><small>${id}</small></button>`);
    const V = v.vocabulary;
    const place = (100 * v.ids[v.i]) / V;
    return `<div class="chips" role="group" aria-label="pieces and ids">${tokens.join('')}</div>`
      + `<p>As a vector this id is <b>one-hot</b>: ${V.toLocaleString('en')} numbers, all 0 but a 1 at place ${v.ids[v.i]}.</p>`
      + `<div class="onehot" role="img" aria-label="one-hot: a 1 at place ${v.ids[v.i]} of ${V}"><i style="left:${place}%"></i></div>`;
  },
};

const factor = (v) => v.pass.config.embedding_scale ?? Math.sqrt(v.shape.d);
const named = (v) => v.pass.config.embedding_scale ?? `√${v.shape.d}`;

export const row = {
  id: 'row',
  formula(v) {
    if (!v.scaled) return 'x = E[id]';
    const own = v.pass.config.embedding_scale;
    return own ? `x = E[id] · ${own}` : `x = E[id] · √<i>d</i>, √${v.shape.d} = ${derived(factor(v), 'root', 4)}`;
  },
  body(v) {
    const name = `${v.stack}.embedding`;
    if (!v.pass.has(`${name}.rows`)) return '<p>The rows themselves are not in this page.</p>';
    const rows = v.pass.row(`${name}.rows`, v.i);
    const out = strip('row of the table', rows, { point: `${name}.rows`, index: v.i, lit: v.c });
    if (!v.scaled) return out;
    const scaled = v.pass.row(`${name}.scaled`, v.i);
    const c = v.c % rows.length;
    return `${out}${strip(`times ${named(v)}`, scaled, { point: `${name}.scaled`, index: v.i, lit: v.c })}`
      + `<p class="cell">column ${c}: ${number(rows[c], `${name}.rows`, `${v.i},${c}`)} × ${derived(factor(v), 'root')} = ${number(scaled[c], `${name}.scaled`, `${v.i},${c}`)}</p>`;
  },
};

/** The curve of one column, with the words on it. */
function curve(v, j) {
  const { at, speed, cosine } = wave(v.pass.config, j);
  const first = v.pass.config.first_position ?? 0;
  const n = v.read.length;
  const [width, height] = [640, 64];
  const x = (p) => 14 + (p * (width - 28)) / Math.max(1, n - 1);
  const y = (value) => height / 2 - value * 24;
  const points = Array.from({ length: 161 }, (_, k) => (k * (n - 1)) / 160);
  const dots = v.read.map((_, p) => `<circle cx="${x(p)}" cy="${y(at(p + first))}" ${p === v.i ? 'r="6" class="on"' : 'r="3.5"'}/>`);
  return `<figure><svg viewBox="0 0 ${width} ${height}" role="img" aria-label="column ${j}, ${cosine ? 'cosine' : 'sine'}: ${n} words on its wave">`
    + `<line x1="0" x2="${width}" y1="${y(0)}" y2="${y(0)}" class="axis"/><path d="M${points.map((p) => `${x(p).toFixed(1)} ${y(at(p + first)).toFixed(1)}`).join('L')}"/>${dots.join('')}</svg>`
    + `<figcaption>column ${j}: ${cosine ? 'cos' : 'sin'}(pos × ${derived(speed, `speed ${j}`)}), a turn every ${derived((2 * Math.PI) / speed, `turn ${j}`)} positions; ‹${escaped(v.read[v.i])}› at ${v.i}: ${derived(at(v.i + first), `wave ${j}`)}</figcaption></figure>`;
}

/** A worked example with d = 4: positions 0 to 3. */
function four() {
  const rows = [0, 1, 2, 3].map((p) => [String(p), ...[0, 1, 2, 3].map((j) => short(wave({ d_model: 4, positions: 'sinusoidal' }, j).at(p), 4))]);
  return table(['position', 'sin(p)', 'cos(p)', 'sin(p / 100)', 'cos(p / 100)'], rows, { label: 'positions with d = 4' });
}

export const position = {
  id: 'position',
  formula: () => 'PE(pos, 2<i>i</i>) = sin(pos / 10000<sup>2<i>i</i>/<i>d</i></sup>), PE(pos, 2<i>i</i>+1) = cos(…)',
  body(v) {
    const [from, to] = [`${v.stack}.embedding.${v.scaled ? 'scaled' : 'rows'}`, `${v.stack}.embedding`];
    const kind = v.pass.config.positions;
    const after = v.pass.row(to, v.i);
    if (!v.pass.has(from)) return strip('what the first layer reads', after, { point: to, index: v.i, lit: v.c });
    const before = v.pass.row(from, v.i);
    const added = after.map((value, j) => value - before[j]);
    const c = v.c % after.length;
    const off = v.off.positions ? '<p class="off">Positions are switched off: nothing is added.</p>' : '';
    const waves = SINUSOIDS.includes(kind) && !v.off.positions
      ? [...new Set([0, 8, 24, c])].filter((j) => j < after.length).sort((a, b) => a - b).map((j) => curve(v, j)).join('') : '';
    return `${off}${v.said.positions[kind] ? `<p>${v.said.positions[kind]}</p>` : ''}${strip('word', before, { point: from, index: v.i, lit: v.c })}`
      + `${strip('+ place', added, { most: 1, lit: v.c })}${strip('= input', after, { point: to, index: v.i, lit: v.c })}`
      + `<p class="cell">column ${c}: ${number(before[c], from, `${v.i},${c}`)} + ${derived(added[c], 'place')} = ${number(after[c], to, `${v.i},${c}`)}</p>`
      + `${waves}${fold('the same with d = 4', `${four()}<p>${v.said.stations.position.four}</p>`)}`;
  },
};
