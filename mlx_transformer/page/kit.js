// Numbers on pages: as text, vectors as strips of cells, attention weights as maps, sums with their terms; and keys.

const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
export const escaped = (text) => String(text).replace(/[&<>"]/g, (letter) => ESCAPES[letter]);

/** Format a number with about three digits and a typographic minus. */
export function short(value, digits = 3) {
  if (value === -Infinity) return '−∞';
  const size = Math.abs(value);
  const text = size === 0 ? '0'
    : size >= 1e5 || size < 5e-4 ? value.toExponential(1)
      : String(Number(value.toPrecision(size >= 100 ? digits + 1 : digits)));
  return text.replaceAll('-', '−');
}

/** Format a number for an attribute: ten digits, more than any test compares. */
const exact = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(10))) : String(value));

const placed = (point, index) => (point ? ` data-point="${point}" data-index="${index}"` : '');

/** Show a number of the model: the value of a named point at an index. */
export const number = (value, point, index) => (
  `<b class="n" data-value="${exact(value)}"${placed(point, index)}>${short(value)}</b>`);

/** Show a number computed from others on the page. */
export const derived = (value, name = '', digits = 3) => `<b class="n"${stated(value, name)}>${short(value, digits)}</b>`;

/** The attributes of such a number: its name within its section, and its value. */
export const stated = (value, name = '') => `${name ? ` data-name="${name}"` : ''} data-derived="${exact(value)}"`;

const ROW = 64; // cells in a row

/** Draw a row of cells as one element: colours and marks are two gradients with hard edges, so that a page of thousands
 * of numbers stays small. of: [share of the largest, is below 0] for each number; values: the numbers; lit: the chosen
 * cell. */
function cells(of, values, { lit = -1, attributes = '' } = {}) {
  const edge = (n) => `${((100 * n) / of.length).toFixed(2)}%`;
  const [colours, marks] = [[], []];
  of.forEach(([share, below], n) => {
    const place = `${edge(n)} ${edge(n + 1)}`;
    colours.push(`color-mix(in srgb,var(--${below ? 'minus' : 'plus'}) ${Math.round(100 * share)}%,var(--zero)) ${place}`);
    marks.push(`${below && share >= 0.02 ? 'var(--ink)' : '#0000'} ${place}`);
  });
  const gradient = (stops) => `linear-gradient(90deg,${stops.join(',')})`;
  const notched = of.some(([, below]) => below) ? `;--m:${gradient(marks)}` : '';
  return `<i${lit >= 0 && lit < of.length ? ' class="on"' : ''}${attributes} data-values="${Array.from(values, exact).join(' ')}"`
    + ` style="--k:${of.length};--at:${lit};--c:${gradient(colours)}${notched}"></i>`;
}

/** Draw a vector as cells: blue above 0, orange with a notch below, white at 0. point, index: the model's point whose
 * last axis this is, from column `from` on; empty if computed from others. lit: the chosen column. fade: opacity. */
export function strip(label, values, { point = '', index = '', from = 0, most = largest(values), lit = -1, fade = 1, kind = '' } = {}) {
  const rows = [];
  for (let at = 0; at < values.length; at += ROW) {
    const row = values.slice(at, at + ROW);
    const attributes = ` data-from="${from + at}"${placed(point, index)}`;
    rows.push(cells(Array.from(row, (v) => [most ? Math.abs(v) / most : 0, v < 0]), row, { lit: lit - at, attributes }));
  }
  const said = `${plain(label)}: ${values.length} numbers from ${short(Math.min(...values))} to ${short(Math.max(...values))}`;
  return `<div class="vector ${kind}"><span class="name">${label}</span><div class="strip" role="img"`
    + ` aria-label="${escaped(said)}" style="--n:${Math.min(ROW, values.length)};--fade:${fade}">${rows.join('')}</div>`
    + `<span class="ends">±${short(most)}</span></div>`;
}

export const largest = (values) => values.reduce((most, v) => Math.max(most, Math.abs(v)), 0);
const plain = (html) => html.replace(/<[^>]*>/g, '');

/** The key for strips. */
export const key = () => '<p class="key" aria-hidden="true"><i class="m" style="--a:1"></i><i class="m" style="--a:.5"></i>'
  + '<i style="--a:0"></i><i style="--a:.5"></i><i style="--a:1"></i> below 0 (notched at the foot) · 0 · above 0;'
  + ' ± is the largest of the strip. Click a cell to work that column out.</p>';

/** Draw weights (rows x columns), with words at both. lit: the chosen row. options.rows: indices of these rows in the
 * point; null: all. */
export function map(label, rows, columns, weight, { point, index, lit = -1, rows: places = null, said }) {
  const lines = rows.map((row, r) => {
    const weights = columns.map((_, c) => weight(r, c));
    const attributes = ` data-from="0"${placed(point, `${index}${places ? places[r] : r}`)} data-say="${escaped(row)}"`;
    return `<div class="line${r === lit ? ' on' : ''}"><span>${escaped(row)}</span>${cells(weights.map((w) => [Math.sqrt(w), false]), weights, { attributes })}</div>`;
  });
  const named = columns.map((text) => `<span>${escaped(text)}</span>`).join('');
  return `<div class="map${columns.length > DENSE ? ' dense' : ''}" role="img" aria-label="${escaped(`${label}: ${said}`)}" style="--n:${columns.length}"`
    + ` data-columns="${escaped(JSON.stringify(columns))}"><div class="columns">${named}</div>${lines.join('')}</div>`;
}

const DENSE = 24; // more columns leave no room for words

/** The key for maps. */
export const mapKey = () => '<p class="key of-map" aria-hidden="true">0 <i style="--a:0"></i><i style="--a:.32"></i><i style="--a:.5"></i><i style="--a:.71"></i><i style="--a:1"></i> 1, between them .1, .25, .5'
  + ' · a row is a word that looks, a column one that is looked at; a row adds up to 1. Click a map: it becomes larger.</p>';

/** A block that can be opened; its content isn't part of the page until then. */
export const fold = (title, html, open = false) => (
  `<details${open ? ' open' : ''}><summary>${title}</summary>${open ? html : `<template>${html}</template>`}</details>`);

/** Make the content of an open block part of the page. */
export function unfolded(block) {
  const held = block.open && block.querySelector(':scope > template');
  if (held) held.replaceWith(held.content);
}

/** Write out a sum. terms: [[text, value]]; total: HTML of the result. */
export function sum(terms, total, { open = terms.length <= 24 } = {}) {
  const written = terms.map(([text, value]) => (
    `<span class="term" data-term="${exact(value)}">${text}${text ? ' = ' : ''}<b class="n">${short(value)}</b></span>`)).join('');
  return `<div class="sum">${fold(`${terms.length} terms`, `<div class="terms">${written}</div>`, open)}<p class="total">their sum: ${total}</p></div>`;
}

/** The dot product of two vectors as terms of `sum`. */
export const products = (a, b) => Array.from(a, (x, k) => [`${short(x)}·${short(b[k])}`, x * b[k]]);

/** Make a table; cells are HTML. lit: the chosen row. pick: makes the first cells buttons, with the row's index in a
 * data attribute of this name. */
export function table(head, rows, { lit = -1, pick = '', label } = {}) {
  const line = (row, i) => {
    const attributes = i === lit ? ' class="on"' : '';
    const name = pick ? `<button type="button" data-${pick}="${i}"${i === lit ? ' aria-pressed="true"' : ''}>${row[0]}</button>` : row[0];
    return `<tr${attributes}><th scope="row">${name}</th>${row.slice(1).map((cell) => `<td>${cell}</td>`).join('')}</tr>`;
  };
  return `<div class="wide" tabindex="0" role="region" aria-label="${escaped(label)}"><table><thead><tr>`
    + `${head.map((name) => (name ? `<th scope="col">${name}</th>` : '<td></td>')).join('')}</tr></thead><tbody>`
    + `${rows.map(line).join('')}</tbody></table></div>`;
}

/** A bar for a share from 0 to 1. */
export const bar = (share) => `<span class="share" aria-hidden="true"><i style="width:${(100 * share).toFixed(1)}%"></i></span>`;

const valuesOf = (row) => row.dataset.values.split(' ').map(Number);

/** The index of the cell under the pointer. */
function cellAt(row, x) {
  const { left, width } = row.getBoundingClientRect();
  const count = valuesOf(row).length;
  return Math.max(0, Math.min(count - 1, Math.floor(((x - left) * count) / width)));
}

/** The vector's column under the pointer, for a row of a strip. */
export const columnOf = (row, x) => Number(row.dataset.from) + cellAt(row, x);

/** Listen for events: show the value under the pointer in `readout`, fill blocks when they are opened, and list a
 * section's numbers as a table. */
export function listen(root, readout) {
  const pointed = ({ target, clientX: x }) => {
    const row = target.closest?.('.strip i, .map i');
    readout.hidden = !row;
    if (!row) return;
    const value = short(valuesOf(row)[cellAt(row, x)], 4);
    const columns = row.closest('[data-columns]')?.dataset.columns;
    readout.textContent = columns ? `${row.dataset.say} → ${JSON.parse(columns)[cellAt(row, x)]}: ${value}` : `column ${columnOf(row, x)}: ${value}`;
    readout.style.left = `${Math.max(4, Math.min(innerWidth - 190, x - 30))}px`;
    readout.style.top = `${row.getBoundingClientRect().top - 30}px`;
  };
  for (const kind of ['pointerover', 'pointermove']) root.addEventListener(kind, pointed);
  root.addEventListener('toggle', ({ target }) => {
    if (target.matches?.('details')) unfolded(target);
    if (!target.matches?.('.numbers') || !target.open || target.querySelector('table')) return;
    const strips = [...target.closest('section').querySelectorAll('.vector')];
    const rows = strips.map((each) => [each.querySelector('.name').textContent,
      ...[...each.querySelectorAll('i')].flatMap(valuesOf).map((value) => short(value, 4))]);
    const widest = Math.max(1, ...rows.map((row) => row.length)) - 1;
    target.insertAdjacentHTML('beforeend', table(['', ...Array(widest).keys()], rows, { label: `the numbers: ${target.closest('section').querySelector('h2').textContent}` }));
  }, true);
}
