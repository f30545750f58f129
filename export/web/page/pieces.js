// SentencePiece, unigram (Kudo 2018) or BPE, from an imported model's tokenizer.json: text to ids and back. As
// mlx_transformer/text/sentencepiece_tokenizer.py and published_ids.py.

import { Charsmap } from './charsmap.js';
import { merger } from './merges.js';

const MARK = '\u2581'; // a space in a piece
const UNKNOWN_BELOW = 10; // an unknown letter scores this much below the lowest piece
const WORDS = new RegExp(`${MARK}[^${MARK}]*|[^${MARK}]+`, 'gu');
const byteToken = (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`;

export class Pieces {
  /** specification: a parsed tokenizer.json. special: ids without text. */
  constructor(specification, special) {
    const { model, normalizer, pre_tokenizer: before, decoder, added_tokens: added, post_processor: template } = specification;
    const roles = template.mlx_transformer ?? {};
    const steps = normalizer?.normalizers ?? [];
    const table = steps.find(({ type }) => type === 'Precompiled');
    const spaces = steps.find(({ type }) => type === 'Replace');
    this.charsmap = table && new Charsmap(table.precompiled_charsmap);
    this.spaces = spaces && new RegExp(spaces.pattern.Regex, 'gu');
    this.scheme = before.prepend_scheme;
    this.split = before.split ?? true;
    const unigram = model.type === 'Unigram';
    const texts = [];
    if (unigram) model.vocab.forEach(([text], id) => { texts[id] = text; });
    else for (const [text, id] of Object.entries(model.vocab)) texts[id] = text;
    this.size = texts.length;
    this.unknown = unigram ? model.unk_id : model.vocab[model.unk_token];
    this.fallback = model.byte_fallback ?? false;
    this.byteIds = Array.from({ length: 256 }, (_, byte) => texts.indexOf(byteToken(byte)));
    this.surfaces = 'lookup' in roles ? new Map(texts.flatMap((text, id) => (text.startsWith(' ') ? [[text.slice(1), id]] : []))) : new Map();
    this.prefixes = roles.prefixes ? new Map(added.filter((each) => !each.special).map(({ content, id }) => [content, id])) : null;
    // Control pieces never match in a text.
    const control = new Set(added.map(({ content }) => content));
    if (unigram) this.#readUnigram(model.vocab, control, roles.missing ?? []);
    else this.#readBpe(texts, control, model.merges);
    this.special = special;
    const behind = decoder.decoders ?? [decoder];
    this.texts = behind[0].type === 'Replace' ? texts.map((text) => text.replaceAll(' ', '')) : texts;
    this.isByte = this.fallback && behind.some(({ type }) => type === 'ByteFallback')
      ? new Map(this.byteIds.map((id, byte) => [id, byte])) : new Map();
    this.word = / ?[^ ]+| +/gu;
  }

  #readUnigram(vocabulary, control, missing) {
    const all = [...vocabulary.map(([text, score]) => [control.has(text) ? `${text} ` : text, score]), ...missing];
    this.scores = Float64Array.from(all, ([, score]) => score);
    this.ids = new Map(all.map(([text], id) => [text, id]));
    this.longest = new Map(); // first letter -> length of the longest piece
    for (const [text] of all) {
      const letters = Array.from(text);
      this.longest.set(letters[0], Math.max(letters.length, this.longest.get(letters[0]) ?? 0));
    }
    this.unknownScore = this.scores.reduce((least, score) => Math.min(least, score), Infinity) - UNKNOWN_BELOW;
    this.pieces = (letters) => this.#likeliest(letters);
  }

  #readBpe(texts, control, merges) {
    this.ids = new Map(texts.flatMap((text, id) => (control.has(text) ? [] : [[text, id]])));
    this.pieces = merger(this.ids, merges);
  }

  cut(text) {
    const [first, rest] = this.#withoutPrefix(text);
    let given = this.charsmap ? this.charsmap.normalized(rest) : rest;
    if (this.spaces) given = given.replace(this.spaces, '');
    if (!given) return first;
    given = given.replaceAll(' ', MARK);
    if (this.scheme !== 'never' && !given.startsWith(MARK)) given = MARK + given;
    const words = this.split ? given.match(WORDS) : [given];
    return [...first, ...words.flatMap((word) => this.#known(this.pieces(Array.from(word))))];
  }

  /** The text of ids without special ones. */
  text(ids) {
    const parts = [];
    let bytes = [];
    const endBytes = () => {
      if (bytes.length) parts.push(...decoded(bytes));
      bytes = [];
    };
    for (const id of ids.filter((each) => !this.special.has(each) && this.texts[each] !== undefined)) {
      if (this.isByte.has(id)) {
        bytes.push(this.isByte.get(id));
        continue;
      }
      endBytes();
      parts.push(this.texts[id]);
    }
    endBytes();
    const dropped = this.scheme === 'never' ? ' ' : '';
    return parts.map((part, i) => part.replaceAll(MARK, i ? ' ' : dropped)).join('');
  }

  /** The text of an output's first ids, as far as later ids can't change it: bytes may still join. */
  settled(ids) {
    const last = ids.findLastIndex((id) => !this.special.has(id) && !this.isByte.has(id));
    return this.text(ids.slice(0, last + 1));
  }

  /** [ids of a token such as >>deu<< at the beginning of a text, the rest]. */
  #withoutPrefix(text) {
    const end = this.prefixes && text.startsWith('>>') ? text.indexOf('<<') + 2 : 0;
    return end < 2 ? [[], text] : [[this.prefixes.get(text.slice(0, end)) ?? this.unknown], text.slice(end)];
  }

  /** Turn pieces, which are ids or unknown letters, into ids. */
  #known(pieces) {
    const found = [];
    for (let i = 0; i < pieces.length;) {
      if (typeof pieces[i] === 'number') {
        found.push(pieces[i] < this.size ? pieces[i] : this.unknown);
        i += 1;
        continue;
      }
      let run = '';
      while (typeof pieces[i] === 'string') run += pieces[i++];
      if (this.fallback) found.push(...Array.from(new TextEncoder().encode(run), (byte) => this.byteIds[byte]));
      else found.push((run.includes(MARK) ? undefined : this.surfaces.get(run)) ?? this.unknown);
    }
    return found;
  }

  /** Viterbi: the pieces with the highest total score; an unknown letter is returned itself. */
  #likeliest(letters) {
    const n = letters.length;
    const best = Array.from({ length: n + 1 }, () => null); // best piece ending here: {score, from, id}
    best[0] = { score: 0 };
    for (let from = 0; from < n; from++) {
      const { score } = best[from];
      const better = (to, id, sum) => {
        if (!best[to] || sum > best[to].score) best[to] = { score: sum, from, id };
      };
      let [text, single] = ['', false];
      const most = Math.min(n - from, this.longest.get(letters[from]) ?? 0);
      for (let length = 1; length <= most; length++) {
        text += letters[from + length - 1];
        const id = this.ids.get(text);
        if (id === undefined) continue;
        better(from + length, id, score + this.scores[id]);
        single ||= length === 1;
      }
      if (!single) better(from + 1, undefined, score + this.unknownScore);
    }
    const found = [];
    for (let at = n; at > 0; at = best[at].from) found.push(best[at].id ?? letters[at - 1]);
    return found.reverse();
  }
}

/** The text of consecutive bytes; if they are no valid UTF-8, U+FFFD for each. */
function decoded(bytes) {
  try {
    return [new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes))];
  } catch {
    return bytes.map(() => '\ufffd');
  }
}
