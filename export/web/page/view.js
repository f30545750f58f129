// Draws output words, choices, tables and facts.

const SEPARATORS = /^\p{Z}+/u;

export const find = (id) => document.getElementById(id);

export function made(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** The words [{text, at}] of an output. Unchanged words keep their elements, and so the focus. forced: number of
 * given tokens. chosen(word, button): called on a click; without it words are plain text. */
export function showWords(box, words, forced, chosen) {
  const shown = Array.from(box.children);
  words.forEach((word, i) => {
    const old = shown[i];
    if (old?.dataset.word === word.text && old.dataset.at === String(word.at) && Boolean(old.querySelector('button')) === Boolean(chosen)) {
      old.lastElementChild.className = word.at < forced ? 'chosen' : '';
      return;
    }
    const [space] = word.text.match(SEPARATORS) ?? [''];
    const text = word.text.slice(space.length);
    const inner = made(chosen && text ? 'button' : 'span', { textContent: text, className: word.at < forced ? 'chosen' : '' });
    if (inner.localName === 'button') {
      inner.type = 'button';
      inner.setAttribute('aria-expanded', 'false');
      inner.onclick = () => chosen(word, inner);
    }
    const element = made('span', {}, space, inner);
    Object.assign(element.dataset, { word: word.text, at: word.at });
    if (old) old.replaceWith(element);
    else box.append(element);
  });
  for (const extra of shown.slice(words.length)) extra.remove();
}

/** Buttons for the most likely tokens [{text, probability}] at a word's place. */
export function showChoices(list, found, chosen) {
  list.replaceChildren(...found.map((each) => {
    const share = made('small', { textContent: `${(100 * each.probability).toPrecision(2)} %` });
    const button = made('button', { type: 'button', onclick: () => chosen(each) }, each.text.replace(/^ /u, '') || '␣', share);
    return made('li', {}, button);
  }));
}

export function showFacts(list, facts) {
  const entries = Object.entries(facts).filter(([, value]) => value !== undefined);
  list.replaceChildren(...entries.map(([name, value]) => (
    made('div', {}, made('dt', { textContent: name }), made('dd', { textContent: value }))
  )));
}

/** Rows of cells, each a text or {text, className}. */
export function showRows(body, rows) {
  body.replaceChildren(...rows.map((cells) => made('tr', {}, ...cells.map((cell) => (
    typeof cell === 'string' ? made('td', { textContent: cell }) : made('td', { textContent: cell.text, className: cell.className })
  )))));
}

/** A table of shares, darker for larger ones, with labelled rows and columns. */
export function showShares(table, { columns, rows, shares }) {
  const head = columns.map((name) => made('th', { scope: 'col', textContent: name }));
  const body = rows.map((name, i) => made('tr', {}, made('th', { scope: 'row', textContent: name }), ...shares[i].map((share) => {
    const cell = made('td', { className: 'n', textContent: String(Math.round(100 * share)) });
    cell.style.setProperty('--share', share.toFixed(3));
    return cell;
  })));
  table.replaceChildren(made('thead', {}, made('tr', {}, made('td'), ...head)), made('tbody', {}, ...body));
}

export const megabytes = (bytes) => (bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0);
export const rounded = (value) => (value >= 100 ? value.toFixed(0) : value.toPrecision(2));
