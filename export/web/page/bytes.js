// Byte-level BPE (Radford et al. 2019): text to ids and back. Words are cut as `train` does, or as GPT-2 does.

import { merger } from './merges.js';

const SPACE = String.raw`\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000`; // Unicode's White_Space
const GPT_2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+|[${SPACE}]+(?![^${SPACE}])|[${SPACE}]+`;
const MOST_WORDS = 20_000; // most words to remember

/** The letter for each byte in the vocabulary: the byte itself if it is printable. */
function letters() {
  const printed = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printed(byte) ? byte : next++));
}

export class ByteLevel {
  /** specification: a parsed tokenizer.json. special: ids without text. */
  constructor({ model, pre_tokenizer: before, added_tokens: added }, special) {
    const ids = new Map(Object.entries(model.vocab));
    this.special = special;
    this.spaceFirst = before.add_prefix_space ?? false;
    this.word = new RegExp(before.pretokenizers?.[0].pattern.Regex ?? GPT_2, 'gu');
    this.merged = merger(ids, model.merges);
    this.letters = letters();
    this.known = new Map(); // words seen before -> their ids
    const bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.bytes = []; // by id
    const spelled = [...ids, ...added.map(({ id, content }) => [content, id])];
    for (const [token, id] of spelled.filter((each) => !special.has(each[1]))) {
      const found = Array.from(token, (letter) => bytes.get(letter)); // an added token may have other letters
      this.bytes[id] = found.includes(undefined) ? new TextEncoder().encode(token) : Uint8Array.from(found);
    }
  }

  /** A text as tokens are looked for in it. */
  normalized(text) {
    return text;
  }

  /** [ids of what a text begins with before it is normalised, the rest]. */
  withoutPrefix(text) {
    return [[], text];
  }

  cut(text) {
    const given = this.spaceFirst && text && !text.startsWith(' ') ? ` ${text}` : text;
    return given.match(this.word)?.flatMap((word) => this.#ids(word)) ?? [];
  }

  /** The text of ids without special ones; invalid UTF-8 becomes U+FFFD. */
  text(ids) {
    const parts = ids.map((id) => this.bytes[id] ?? new Uint8Array(0));
    const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts) {
      all.set(part, at);
      at += part.length;
    }
    return new TextDecoder('utf-8', { ignoreBOM: true }).decode(all);
  }

  /** The text of an output's first ids, as far as later ids can't change it. */
  settled(ids) {
    return this.text(ids).replace(/\ufffd+$/u, '');
  }

  #ids(word) {
    let ids = this.known.get(word);
    if (!ids) {
      if (this.known.size > MOST_WORDS) this.known.clear();
      ids = this.merged(Array.from(new TextEncoder().encode(word), (byte) => this.letters[byte]));
      this.known.set(word, ids);
    }
    return ids;
  }
}
