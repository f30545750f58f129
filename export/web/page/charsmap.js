// SentencePiece's table of replacements; at each place the longest match counts. As mlx_transformer/text/sentencepiece.py.

const LETTER = 0x800000ff; // a unit's letter; bit 31 marks a value
const offset = (unit) => (unit >>> 10) << ((unit & 0x200) >>> 6);

export class Charsmap {
  /** table: base64 of a trie's size (four bytes), the trie, and the replacements, each ended by NUL. */
  constructor(table) {
    const bytes = Uint8Array.from(atob(table), (letter) => letter.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const size = view.getUint32(0, true);
    this.units = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
    this.ends = bytes.subarray(4 + size);
  }

  normalized(text) {
    const [bytes, found] = [new TextEncoder().encode(text), []];
    for (let at = 0; at < bytes.length;) {
      const [length, value] = this.#longest(bytes, at);
      if (length) {
        for (let i = value; i < this.ends.length && this.ends[i]; i++) found.push(this.ends[i]);
        at += length;
      } else {
        do found.push(bytes[at++]); while ((bytes[at] & 0xc0) === 0x80); // one character
      }
    }
    return new TextDecoder('utf-8', { ignoreBOM: true }).decode(Uint8Array.from(found));
  }

  /** [bytes of the longest match from there, offset of its replacement]; [0, 0] without a match. */
  #longest(bytes, at) {
    const { units } = this;
    let [place, best] = [0, [0, 0]];
    for (let i = at; i < bytes.length; i++) {
      const child = place ^ offset(units[place]) ^ bytes[i];
      if (child >= units.length || (units[child] & LETTER) >>> 0 !== bytes[i]) break;
      place = child;
      const value = place ^ offset(units[place]);
      if (units[place] & 0x100 && value < units.length) best = [i + 1 - at, units[value] & 0x7fffffff];
    }
    return best;
  }
}
