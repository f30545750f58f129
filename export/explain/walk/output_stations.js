// From the last vector to a word: logits, softmax, and the search for a whole output.

import { bar, derived, escaped, fold, number, products, short, stated, strip, sum, table } from '../../../mlx_transformer/page/kit.js';
import { softmax } from './pass.js';

const SHOWN = 8;

export const logits = {
  id: 'logits',
  formula: () => 'logit<sub>w</sub> = h · E<sub>w</sub>;  p<sub>w</sub> = e<sup>logit / T</sup> / Σ e<sup>logit / T</sup>',
  controls: (v) => `<label class="slide">temperature <input type="range" id="temperature" min="0.1" max="4" step="0.1" value="${v.temperature}"> <output>${v.temperature}</output></label>`
    + `<label>top-k: keep the likeliest <select id="top-k">${[0, 1, 2, 3, 5, 8].map((k) => `<option value="${k}"${k === v.topK ? ' selected' : ''}>${k || 'all'}</option>`).join('')}</select></label>`,
  body(v) {
    const { stack, i, shape } = v.out;
    const last = v.pass.has('head') ? 'head' : shape.last();
    const h = v.pass.row(last, i);
    const row = v.pass.row('logits', i);
    const T = v.temperature;
    const order = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, SHOWN);
    const kept = new Set(order.slice(0, v.topK || SHOWN));
    const p = softmax(Array.from(row, (x, id) => (v.topK && !kept.has(id) ? -Infinity : x / T)));
    const chosen = v.written[i];
    if (!order.includes(chosen)) order.push(chosen);
    const rows = order.map((id) => [
      `<span class="tok">${escaped(v.text(id))}</span>`,
      number(row[id], 'logits', `${i},${id}`), `${derived(p[id], `p ${id}`)} ${bar(p[id])}`,
    ]);
    const who = stack === 'encoder' ? `at ‹${escaped(v.outRead[i])}›` : `while writing ‹${escaped(v.outLabels[i])}›`;
    const matrix = v.parameter(v.outMatrix);
    const shown = order[0];
    let worked = '';
    if (matrix) {
      const scale = v.pass.config.logit_scale ?? 1;
      const e = matrix.subarray(shown * shape.d, (shown + 1) * shape.d).map((x) => x * scale);
      const bias = v.parameter('output_proj.bias');
      const terms = [...products(h, e), ...(bias ? [['bias', bias[shown]]] : [])];
      const cap = v.pass.config.logit_cap;
      const logit = number(row[shown], 'logits', `${i},${shown}`);
      const total = cap ? `x = ${derived(terms.reduce((all, [, value]) => all + value, 0), 'uncapped')}` : logit;
      const capped = cap ? `<p class="cell">${cap} · tanh(x / ${cap}) = ${logit}</p>` : '';
      worked = `<p class="cell">the logit of ‹${escaped(v.text(shown))}›:</p>${sum(terms, total)}${capped}`;
    }
    return `<p class="said"><b>${who}: ‹${escaped(v.text(order[0]))}› ${derived(p[order[0]], `p ${order[0]}`)}</b>, of ${row.length.toLocaleString('en')} tokens</p>`
      + strip(last === 'head' ? 'what the classifier reads' : 'h, the last vector', h, { point: last, index: i, lit: v.c })
      + table(['token', 'logit', 'share'], rows, { lit: order.indexOf(chosen), label: 'the likeliest tokens' }) + worked;
  },
};

export const search = {
  id: 'search',
  formula: () => 'score = log p / ((5 + n) / 6)<sup>α</sup>',
  controls: (v) => (v.live ? `<label>K <select id="beam-size">${[1, 2, 3, 4, 5, 6].map((k) => `<option${k === v.beam ? ' selected' : ''}>${k}</option>`).join('')}</select></label>`
    + `<label class="slide">length penalty α <input type="range" id="alpha" min="0" max="2" step="0.1" value="${v.alpha}"> <output>${v.alpha}</output></label>` : ''),
  body(v) {
    const steps = v.written.map((id, t) => {
      const p = v.pass.has('logits') && v.hasRow('logits', t) ? softmax(v.pass.row('logits', t))[id] : null;
      return [`<span class="tok">${escaped(v.outLabels[t])}</span>`, escaped(v.outRead[t]), p === null ? '' : `${derived(p, `step ${t}`)} ${bar(p)}`];
    });
    return `<div id="tree">${v.tree ? tree(v) : ''}</div><p class="cell">Greedy search, word by word:</p>`
      + table(['written', 'has read', 'share'], steps, { lit: v.step, pick: 'step', label: 'word by word' });
  },
};

/** The tree of a beam search: nodes [{step, parent, token, score, fate, final}], in order of creation. */
function tree(v) {
  const { nodes, best } = v.tree;
  const [column, line, width] = [118, 42, 104];
  const counts = [];
  const row = nodes.map(({ step }) => (counts[step] = (counts[step] ?? -1) + 1));
  const x = (n) => (n < 0 ? -44 : nodes[n].step * column + 54);
  const y = (n) => (n < 0 ? 4 : row[n] * line + 4);
  const path = new Set();
  for (let n = best; n >= 0; n = nodes[n].parent) path.add(n);
  const paths = { best: '', kept: '' };
  nodes.forEach(({ parent, fate }, n) => {
    if (fate === 'dropped') return;
    const [x1, y1, x2, y2] = [x(parent) + width - (parent < 0 ? 14 : 0), y(parent) + 17, x(n), y(n) + 17];
    const bend = (x2 - x1) / 2;
    paths[path.has(n) ? 'best' : 'kept'] += `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  });
  const edges = Object.entries(paths).map(([kind, d]) => `<path class="${kind}" d="${d}"/>`);
  const said = (node) => `log p ${derived(node.score)}${node.final === undefined ? '' : `, score ${derived(node.final)}`}`;
  const fateOf = (node, n) => `${node.fate}${path.has(n) ? ' best' : ''}`;
  const boxes = [...new Set(nodes.map(fateOf))].map((fate) => `<path class="node ${fate}" d="${nodes.map((node, n) => (
    fateOf(node, n) === fate ? `M${x(n)} ${y(n)}h${width}v34h-${width}z` : '')).join('')}"/>`);
  const texts = nodes.map((node, n) => {
    const text = v.text(node.token);
    return `<text${node.fate === 'dropped' ? ' class="p"' : ''} x="${x(n) + 7}" y="${y(n) + 15}">${escaped(text.length > 12 ? `${text.slice(0, 11)}…` : text)}`
      + `<tspan class="p" x="${x(n) + 7}" y="${y(n) + 29}" ${stated(node.final ?? node.score)}>${short(node.final ?? node.score)}</tspan></text>`;
  });
  const size = [(Math.max(...nodes.map(({ step }) => step)) + 1) * column + 60, (Math.max(...counts) + 1) * line + 8];
  const list = nodes.map((node) => `<li>step ${node.step + 1}: ${escaped(v.text(node.token))}, ${said(node)}, ${node.fate}</li>`);
  return `<p class="said">Best: <b>${escaped(v.tree.output)}</b>, score ${derived(v.tree.score, 'score')}${v.tree.output === v.output ? ', the same as greedy search' : `; greedy search says: ${escaped(v.output)}`}.</p>`
    + `<div class="wide" tabindex="0" role="region" aria-label="the tree of the beam search"><svg class="tree" width="${size[0]}" height="${size[1]}" role="img" aria-label="beam search, ${nodes.length} candidates">`
    + `<text x="4" y="25">start</text>${edges.join('')}${boxes.join('')}${texts.join('')}</svg></div>${fold('the search as a list', `<ol>${list.join('')}</ol>`)}`;
}
