// Byte-level BPE of a tokenizer.json that this project trained: text to ids and back, as the Python package has it.

const SPECIAL = 4; // <pad>, <s>, </s>, <unk>
const EOS = 2;

/** The letter that stands for each byte in the vocabulary (Radford et al. 2019): itself, if it can be printed. */
function letters() {
  const printed = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printed(byte) ? byte : next++));
}

export class Tokenizer {
  /** specification: a parsed tokenizer.json. */
  constructor(specification) {
    const { model, pre_tokenizer: before, added_tokens: added } = specification;
    this.ids = new Map(Object.entries(model.vocab));
    this.special = new Set(added.map(({ id }) => id));
    this.piece = new RegExp(before.pretokenizers[0].pattern.Regex, 'gu');
    this.ranks = new Map(model.merges.map((pair, rank) => [Array.isArray(pair) ? pair.join(' ') : pair, rank]));
    this.letters = letters();
    this.known = new Map(); // pieces seen before, with their ids
    const bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.bytes = []; // of each id
    for (const [token, id] of this.ids) {
      if (id >= SPECIAL && !this.special.has(id)) this.bytes[id] = Uint8Array.from(token, (letter) => bytes.get(letter));
    }
  }

  /** Ids of a text, </s> at the end. What is typed is text: "</s>" in it is four characters. */
  encode(text) {
    const ids = text.toWellFormed().match(this.piece)?.flatMap((piece) => this.#merged(piece)) ?? [];
    return [...ids, EOS];
  }

  /** The text of ids, special ones left out; bytes that are no UTF-8 become U+FFFD. */
  decode(ids) {
    const parts = ids.map((id) => this.bytes[id] ?? new Uint8Array(0));
    const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts) {
      all.set(part, at);
      at += part.length;
    }
    return new TextDecoder('utf-8', { ignoreBOM: true }).decode(all);
  }

  /** The words of an output: [{text, at}], `at` being the index of the token with which a word begins. */
  words(ids) {
    const words = [];
    let [before, begun] = ['', -1];
    for (let i = 0; i < ids.length; i++) {
      const text = this.decode(ids.slice(0, i + 1)).replace(/\ufffd+$/u, '');
      if (text.length === before.length) {
        begun = begun < 0 ? i : begun; // a part of a character, with which a word may begin
        continue;
      }
      const starts = [...text.matchAll(this.piece)].some(({ index }) => index === before.length);
      if (starts || !words.length) words.push({ text: '', at: begun < 0 ? i : begun });
      words.at(-1).text += text.slice(before.length);
      [before, begun] = [text, -1];
    }
    const rest = this.decode(ids).slice(before.length);
    if (rest) words.push({ text: rest, at: begun });
    return words;
  }

  #merged(piece) {
    let ids = this.known.get(piece);
    if (!ids) {
      if (this.known.size > 20_000) this.known.clear();
      ids = this.#merge(Array.from(new TextEncoder().encode(piece), (byte) => this.letters[byte]));
      this.known.set(piece, ids);
    }
    return ids;
  }

  /** The merge that was learned first, again and again, the leftmost of equal ones. */
  #merge(parts) {
    for (;;) {
      let [best, at] = [Infinity, -1];
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`);
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return parts.map((part) => this.ids.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }
}
