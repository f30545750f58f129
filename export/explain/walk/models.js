// A model that the page computes, for any typed text.

import { beamSearch } from '../../web/page/beam.js';
import { ByteLevel } from '../../web/page/bytes.js';
import { tokens } from '../../web/page/greedy.js';
import { penalty } from '../../web/page/limits.js';
import { logSumExp } from '../../web/page/sampling.js';
import { readTensors } from '../live/safetensors.js';
import { Twin } from '../live/twin.js';
import { Pass } from './pass.js';
import { marked, piecesOf, specialText } from './pieces.js';
import { rest } from './resting.js';

/** Most tokens of a text that are read, the end token among them. */
export const MOST_TOKENS = 64;
const MOST_LETTERS = 1000;

export const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** The points of a pass, computed by the page's engine: {point: {data, shape}}. */
export function computed(twin, { source, target }, switches = twin.switches) {
  const points = {};
  const watch = (name, data, shape) => { points[name] = { data, shape }; };
  const memory = twin.hasEncoder ? twin.encode(source, { switches, watch }).memory : null;
  if (target.length) twin.decode(target, memory, { switches, watch });
  return points;
}

export class Live {
  constructor(spec) {
    Object.assign(this, { spec, config: spec.config, live: true, vocabulary: spec.config.vocab_size });
    this.names = Object.fromEntries(spec.tokenizer.added_tokens.map(({ id, content }) => [id, content]));
    this.tokenizer = new ByteLevel(spec.tokenizer, new Set(Object.keys(this.names).map(Number)));
    this.maskId = spec.tokenizer.added_tokens.find(({ content }) => content === '<mask>')?.id;
    this.twin = new Twin(spec.config, readTensors(bytesOf(spec.weights).buffer));
    this.twin.config = { ...spec.config, generation: spec.generation }; // for the searches
    this.twin.rest = rest;
    this.words = new Set(spec.words);
    this.weights = this.twin.weights;
    this.parameters = this.weights;
  }

  text(id) {
    if (id in this.names) return specialText(this.names[id]);
    const text = this.tokenizer.text([id]);
    return text.includes('\ufffd') ? 'part of a character' : marked(text);
  }

  pieces(ids) {
    return piecesOf(this.tokenizer, this.names, ids);
  }

  /** Ids of a text, the first that fit; ▢ or <mask> becomes the mask token. */
  ids(text) {
    const begin = text.slice(0, MOST_LETTERS);
    const parts = this.maskId === undefined ? [begin] : begin.split(/ ?(?:▢|<mask>)/u);
    const ids = parts.flatMap((part, n) => [...(n ? [this.maskId] : []), ...this.tokenizer.cut(part.toWellFormed())]);
    return [...ids.slice(0, MOST_TOKENS - 1), this.config.eos_id];
  }

  /** The model's output with these parts off: {ids, logP}. stopped: whether nobody waits for it any more. */
  async written(text, switches, stopped = () => false) {
    const { source, prefix } = this.given(text);
    const found = [];
    let logP = 0;
    for await (const { id, logProbability } of tokens(this.twin.with(switches), source, { prefix, stopped })) {
      found.push(id);
      if (found.length > prefix.length) logP += logProbability;
    }
    return { ids: found, logP, output: this.tokenizer.text(found.slice(prefix.length)).trim() };
  }

  given(text) {
    const ids = this.ids(text);
    return this.config.architecture === 'decoder' ? { source: [], prefix: ids.slice(0, -1) } : { source: ids, prefix: [] };
  }

  /** A pass over a text, and the whole model's output. With parts off the same tokens are read. */
  async read(text, switches = {}, stopped = () => false) {
    if (this.config.architecture === 'encoder') return this.pass({ source: this.ids(text), written: this.ids(text) }, switches, { text, output: '' });
    const { source, prefix } = this.given(text);
    const { ids, logP, output } = await this.written(text, {}, stopped);
    return this.pass({ source, written: ids }, switches, { text, output, logP, given: prefix.length });
  }

  /** The points of one pass over these ids. */
  pass({ source, written }, switches, rest) {
    const { config, twin } = this;
    const target = config.architecture === 'encoder' ? [] : [config.bos_id, ...written.slice(0, -1)];
    const points = computed(twin, { source, target }, switches);
    const pieces = { source: this.pieces(source), target: this.pieces(target), written: this.pieces(written) };
    return new Pass(config, points, { source, target, written }, pieces, rest);
  }

  /** log p of the written tokens, teacher-forced; in an encoder, of the most likely token at ▢. */
  logP(pass, switches) {
    const { points } = this.pass(pass.tokens, switches, {});
    const V = points.logits.shape.at(-1);
    const row = (t) => points.logits.data.subarray(t * V, (t + 1) * V);
    if (this.config.architecture === 'encoder') {
      const at = Math.max(0, pass.tokens.source.indexOf(this.maskId));
      const whole = pass.row('logits', at);
      const best = whole.indexOf(Math.max(...whole));
      return row(at)[best] - logSumExp(row(at));
    }
    return pass.tokens.written.reduce((sum, id, t) => (t < pass.given ? sum : sum + row(t)[id] - logSumExp(row(t))), 0);
  }

  /** The tree of a beam search: {nodes: [{step, parent, token, score, fate, final}], best, output, score}. */
  async tree(text, switches, { beam, alpha: lengthPenalty }, stopped = () => false) {
    const { source, prefix } = this.given(text);
    const nodes = [];
    let live = [-1];
    const seen = ({ t, candidates, ending, going }) => {
      const made = new Map();
      for (const each of candidates) {
        const fate = ending.includes(each) ? 'finished' : going.includes(each) ? 'kept' : 'dropped';
        made.set(each, nodes.length);
        const final = fate === 'finished' ? { final: each.score / penalty(t + 1, lengthPenalty, this.spec.generation) } : {};
        nodes.push({ step: t - prefix.length, parent: live[each.parent], token: each.token, score: each.score, fate, ...final });
      }
      if (going.length) live = going.map((each) => made.get(each));
    };
    const [found] = await beamSearch(this.twin.with(switches), source, { beam, lengthPenalty, prefix, stopped, heard() {}, seen });
    if (stopped()) return null;
    const best = nodes.reduce((at, { final }, n) => (final !== undefined && (at < 0 || final > nodes[at].final) ? n : at), -1);
    return { nodes, best, output: this.tokenizer.text(found.ids.slice(prefix.length)).trim(), score: found.score };
  }
}
