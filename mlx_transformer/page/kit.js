// What pages show numbers with: text, strips of a vector, maps of weights, sums worked out, and the key beside them.

const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
export const escaped = (text) => String(text).replace(/[&<>"]/g, (letter) => ESCAPES[letter]);

/** A number for people: three digits or so, a true minus. */
export function short(value, digits = 3) {
  if (value === -Infinity) return '−∞';
  const size = Math.abs(value);
  const text = size === 0 ? '0'
    : size >= 1e5 || size < 5e-4 ? value.toExponential(1)
      : String(Number(value.toPrecision(size >= 100 ? digits + 1 : digits)));
  return text.replace('-', '−');
}

/** As it stands in an attribute: ten digits, more than any comparison asks for. */
const exact = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(10))) : String(value));

const placed = (point, index) => (point ? ` data-point="${point}" data-index="${index}"` : '');

/** A number of the model: the value of a named point at an index. */
export const number = (value, point, index) => (
  `<b class="n" data-value="${exact(value)}"${placed(point, index)}>${short(value)}</b>`);

/** A number that follows from others on the page. */
export const derived = (value, name = '') => (
  `<b class="n"${name ? ` data-name="${name}"` : ''} data-derived="${exact(value)}">${short(value)}</b>`);

/** A vector as cells: blue above 0, orange and notched below, white 0. point and index: whose last axis it is, from
 * column `from` on; without them it follows from others. lit: the chosen column. fade: how much of it counts. */
export function strip(label, values, { point = '', index = '', from = 0, most = largest(values), lit = -1, fade = 1, kind = '' } = {}) {
  const cells = [];
  for (let i = 0; i < values.length; i++) {
    const v = values[i];
    const a = most ? Math.abs(v) / most : 0;
    const name = `${v < 0 ? 'm' : ''}${a < 0.02 ? ' z' : ''}${i === lit ? ' on' : ''}`;
    cells.push(`<i${name ? ` class="${name}"` : ''} ${point ? 'data-value' : 'data-derived'}="${exact(v)}" style="--a:${a.toFixed(2)}"></i>`);
  }
  const place = point ? ` data-point="${point}" data-index="${index}"` : '';
  const said = `${plain(label)}: ${values.length} numbers from ${short(Math.min(...values))} to ${short(Math.max(...values))}`;
  return `<div class="vector ${kind}"><span class="name">${label}</span><div class="strip" role="img" data-from="${from}"`
    + ` aria-label="${escaped(said)}"${place} style="--n:${Math.min(64, values.length)};--fade:${fade}">${cells.join('')}</div>`
    + `<span class="ends">±${short(most)}</span></div>`;
}

export const largest = (values) => values.reduce((most, v) => Math.max(most, Math.abs(v)), 0);
const plain = (html) => html.replace(/<[^>]*>/g, '');

/** The key of all strips. */
export const key = () => '<p class="key" aria-hidden="true"><i class="m" style="--a:1"></i><i class="m" style="--a:.5"></i>'
  + '<i style="--a:0"></i><i style="--a:.5"></i><i style="--a:1"></i> below 0 (notched at the foot) · 0 · above 0;'
  + ' ± is the largest of the strip. Click a cell to work that column out.</p>';

/** Weights (rows x columns), a row lit. places: which rows of the point these are, unless they are all. */
export function map(label, rows, columns, weight, { point, index, lit = -1, rows: places = null, said }) {
  const cells = rows.map((_, r) => `<span class="line${r === lit ? ' on' : ''}">${columns.map((_, c) => {
    const w = weight(r, c);
    return `<i data-value="${exact(w)}" data-index="${index}${places ? places[r] : r},${c}" data-point="${point}" style="--a:${(w ** 0.75).toFixed(2)}"`
      + ` data-say="${escaped(`${rows[r]} → ${columns[c]}`)}"></i>`;
  }).join('')}</span>`);
  return `<div class="map" role="img" aria-label="${escaped(`${label}: ${said}`)}" style="--n:${columns.length}">${cells.join('')}</div>`;
}

/** The key of all maps. */
export const mapKey = () => '<p class="key" aria-hidden="true">0 <i style="--a:0"></i><i style="--a:.35"></i><i style="--a:.6"></i><i style="--a:.8"></i><i style="--a:1"></i> 1'
  + ' · a row is a word that looks, a column one that is looked at; a row adds up to 1.</p>';

/** A sum written out: terms [[text, value]], and what they add up to, which is HTML with its number. */
export function sum(terms, total, { open = terms.length <= 24 } = {}) {
  const written = terms.map(([text, value]) => (
    `<span class="term" data-term="${exact(value)}">${text}${text ? ' = ' : ''}<b class="n">${short(value)}</b></span>`)).join('');
  return `<div class="sum"><details${open ? ' open' : ''}><summary>${terms.length} terms</summary><div class="terms">${written}</div></details>`
    + `<p class="total">their sum: ${total}</p></div>`;
}

/** A product of two vectors as the terms of `sum`. */
export const products = (a, b) => Array.from(a, (x, k) => [`${short(x)}·${short(b[k])}`, x * b[k]]);

/** A table; cells are HTML. lit: the row that is chosen. pick: what a row's first cell chooses when it is clicked. */
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

/** A bar of a share between 0 and 1. */
export const bar = (share) => `<span class="share" aria-hidden="true"><i style="width:${(100 * share).toFixed(1)}%"></i></span>`;

/** What is pointed at in a strip or a map, in words; and the numbers of a station as a table, when it is opened. */
export function listen(root, readout) {
  root.addEventListener('pointerover', (event) => {
    const cell = event.target.closest?.('.strip i, .map i');
    readout.hidden = !cell;
    if (!cell) return;
    const value = short(Number(cell.dataset.value ?? cell.dataset.derived), 4);
    const box = cell.getBoundingClientRect();
    readout.textContent = cell.dataset.say ? `${cell.dataset.say}: ${value}` : `column ${columnOf(cell)}: ${value}`;
    readout.style.left = `${Math.max(4, Math.min(innerWidth - 190, box.left - 30))}px`;
    readout.style.top = `${box.top - 30}px`;
  });
  root.addEventListener('toggle', ({ target }) => {
    if (!target.matches?.('.numbers') || !target.open || target.querySelector('table')) return;
    const strips = [...target.closest('section').querySelectorAll('.vector')];
    const widest = Math.max(0, ...strips.map((each) => each.querySelectorAll('i').length));
    const rows = strips.map((each) => [each.querySelector('.name').textContent,
      ...Array.from(each.querySelectorAll('i'), (cell) => short(Number(cell.dataset.value ?? cell.dataset.derived), 4))]);
    target.insertAdjacentHTML('beforeend', table(['', ...Array(widest).keys()], rows, { label: `the numbers: ${target.closest('section').querySelector('h2').textContent}` }));
  }, true);
}

export const columnOf = (cell) => Number(cell.parentNode.dataset.from) + [...cell.parentNode.children].indexOf(cell);
