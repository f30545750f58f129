// SentencePiece, unigram (Kudo 2018) or BPE, from an imported model's tokenizer.json: text to ids and back. As
// mlx_transformer/text/sentencepiece_tokenizer.py and published_ids.py.

import { Charsmap } from './charsmap.js';
import { merger } from './merges.js';

const MARK = '\u2581'; // a space in a piece
const UNKNOWN_BELOW = 10; // an unknown letter scores this much below the lowest piece
const WORDS = new RegExp(`${MARK}[^${MARK}]*|[^${MARK}]+`, 'gu');
const SPACE = /\p{White_Space}+/u;
const byteToken = (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`;

/** The component of a parsed tokenizer.json that marks spaces, alone or behind the one that takes words apart. */
export function markOf({ pre_tokenizer: before }) {
  const mark = before.pretokenizers?.[0].type === 'WhitespaceSplit' ? before.pretokenizers[1] : before;
  return mark.type === 'Metaspace' ? mark : undefined;
}

export class Pieces {
  /** specification: a parsed tokenizer.json. special: ids without text. */
  constructor(specification, special) {
    const { model, normalizer, decoder, added_tokens: added, post_processor: template } = specification;
    const mark = markOf(specification);
    const roles = template.mlx_transformer ?? {};
    const steps = normalizer?.normalizers ?? [];
    const table = steps.find(({ type }) => type === 'Precompiled');
    this.charsmap = table && new Charsmap(table.precompiled_charsmap);
    this.replaced = steps.filter(({ type }) => type === 'Replace').map((step) => [new RegExp(step.pattern.Regex, 'gu'), step.content]);
    this.ofWords = mark !== specification.pre_tokenizer;
    this.scheme = mark.prepend_scheme;
    this.split = mark.split ?? true;
    const unigram = model.type === 'Unigram';
    const texts = [];
    for (const { id, content } of added) texts[id] = content;
    if (unigram) model.vocab.forEach(([text], id) => { texts[id] = text; });
    else for (const [text, id] of Object.entries(model.vocab)) texts[id] = text;
    this.size = unigram ? model.vocab.length : Object.keys(model.vocab).length;
    this.unknown = unigram ? model.unk_id : model.vocab[model.unk_token];
    this.fallback = model.byte_fallback ?? false;
    this.byteIds = Array.from({ length: 256 }, (_, byte) => texts.indexOf(byteToken(byte)));
    const found = texts.flatMap((text, id) => (text.startsWith(' ') ? [[text.slice(1), id]] : []));
    const whole = added.filter(({ id }) => roles.whole?.includes(id)).map(({ content, id }) => [content, id]);
    this.surfaces = new Map('lookup' in roles ? [...found, ...whole] : []);
    this.prefixes = roles.prefixes ? new Map(added.filter((each) => !each.special).map(({ content, id }) => [content, id])) : null;
    this.apart = new Set(roles.apart ? (roles.whole ?? []).filter((id) => !special.has(id)) : []);
    this.strips = roles.strips ?? false;
    // Control pieces never match in a text.
    const control = new Set(added.filter(({ id }) => !roles.cut?.includes(id)).map(({ content }) => content));
    if (unigram) this.#readUnigram(model.vocab, control, roles.missing ?? []);
    else this.#readBpe(texts, control, model.merges);
    this.special = special;
    const behind = decoder.decoders ?? [decoder];
    this.texts = behind.some(({ type, pattern }) => type === 'Replace' && pattern.String === ' ') ? texts.map((text) => text.replaceAll(' ', '')) : texts;
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

  /** A text as tokens are looked for in it, its spaces what they become; the prefix is taken off before. */
  normalized(text) {
    const replaced = this.charsmap ? this.charsmap.normalized(text) : text;
    return this.replaced.reduce((made, [pattern, content]) => made.replace(pattern, content), replaced);
  }

  /** Ids of normalised text. isFirst: whether it begins the whole text. */
  cut(text, isFirst = true) {
    const parts = this.ofWords ? text.split(SPACE) : [text];
    return parts.flatMap((part, i) => (part ? this.#cut(part, isFirst && !i) : []));
  }

  #cut(text, isFirst) {
    let given = text.replaceAll(' ', MARK);
    const begins = this.scheme === 'always' || (this.scheme === 'first' && isFirst);
    if (begins && !given.startsWith(MARK)) given = MARK + given;
    const words = this.split ? given.match(WORDS) : [given];
    return words.flatMap((word) => this.#known(this.pieces(Array.from(word))));
  }

  /** The text of ids without special ones; in some families with a space on either side of an added token. */
  text(ids) {
    const spoken = ids.filter((id) => !this.special.has(id));
    if (!spoken.some((id) => this.apart.has(id))) return this.strips ? this.#joined(spoken).trim() : this.#joined(spoken);
    const parts = [];
    let run = [];
    const end = (isLast) => {
      const text = this.#joined(run).trim();
      if (text || (isLast && run.length)) parts.push(text);
      run = [];
    };
    for (const id of spoken) {
      if (!this.apart.has(id)) run.push(id);
      else {
        end(false);
        parts.push(this.texts[id]);
      }
    }
    end(true);
    return parts.join(' ');
  }

  #joined(ids) {
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
  withoutPrefix(text) {
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
