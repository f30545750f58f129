// Tokens as people read them, never bytes. Part of a character shows the character and its share, e.g. "’ 1/3".

const SPECIAL = { '<s>': 'start', '</s>': 'end', '<pad>': 'padding', '<unk>': 'unknown', '<mask>': '▢' };
export const specialText = (token) => SPECIAL[token] ?? token;

/** Text on one line; a leading space becomes a thin mark. */
export const marked = (text) => text.replace(/^ +/, (spaces) => '·'.repeat(spaces.length)).replace(/\n/g, '⏎').replace(/\t/g, '⇥')
  .replace(/[\0-\x1f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)));

const lengthOf = (lead) => (lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1);

/** The text of each id of a sequence. tokenizer: the web page's, with `bytes` by id; names: {id: special token}. */
export function piecesOf(tokenizer, names, ids) {
  const all = [];
  ids.forEach((id, i) => (tokenizer.bytes[id] ?? []).forEach((byte) => all.push([byte, i])));
  const found = ids.map((id) => (id in names ? specialText(names[id]) : ''));
  for (let at = 0; at < all.length;) {
    const bytes = all.slice(at, at + lengthOf(all[at][0]));
    const letter = new TextDecoder().decode(Uint8Array.from(bytes, ([byte]) => byte));
    const owners = new Set(bytes.map(([, owner]) => owner));
    if (owners.size === 1) found[bytes[0][1]] += letter;
    else {
      for (const owner of owners) {
        const share = bytes.filter(([, each]) => each === owner).length;
        found[owner] += `${letter} ${share}/${bytes.length}`;
      }
    }
    at += bytes.length;
  }
  return found.map(marked);
}

/** The words of a text's pieces, a piece each: '' if a model has learned the word, or knows no words. */
export function strangeWords(pieces, known) {
  const words = [];
  pieces.forEach((piece, n) => {
    const begins = n === 0 || piece.startsWith('·') || Object.values(SPECIAL).includes(piece);
    if (begins) words.push({ text: '', from: n });
    words.at(-1).text += piece.replace(/^·+/, '');
  });
  const text = words.flatMap(({ text: word, from }, n) => Array((words[n + 1]?.from ?? pieces.length) - from).fill(word));
  return text.map((word) => (!known.size || known.has(word) || Object.values(SPECIAL).includes(word) ? '' : word));
}

/** How many letters must be added, taken or exchanged to make one word of the other. */
function distance(a, b) {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) next.push(Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1)));
    row = next;
  }
  return row.at(-1);
}

/** The known words that are written most alike. */
export function alike(word, known, count = 3) {
  const small = word.slice(0, 24).toLowerCase();
  return [...known].map((each) => [each, distance(small, each.toLowerCase())]).sort((a, b) => a[1] - b[1]).slice(0, count).map(([each]) => each);
}
