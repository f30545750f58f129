// The Transformer once more, in float64 and plain JavaScript: the page runs it to show every number, and to switch
// parts off. Points are those of the NumPy reference (export/validate/reference) without its batch axis. Equation and
// section numbers are those of "Attention Is All You Need" (Vaswani et al., 2017).
//
// S source, T target, L new tokens, P past, D model, H heads, K key/value heads, d_k and d_v one head's widths.

import { ACTIVATIONS, append, linear, merge, norm, sinusoid, softmax, split, sum } from './layers.js';

const SINUSOIDS = ['sinusoidal', 'sinusoidal_halves', 'sinusoidal_concat'];

/** Parts to switch off: {positions, mask, scale, residual, norm}, true for off; heads [[stack, layer, kind, head]]
 * and sublayers [[stack, layer, kind]], kind as in the names of points. */
export const NOTHING_OFF = { heads: [], sublayers: [] };

/** Supported values of fields; all other fields of a config must be at their defaults. */
const KNOWN = {
  norm_placement: ['post', 'pre'],
  norm: ['layernorm', 'rmsnorm'],
  activation: Object.keys(ACTIVATIONS),
  positions: [...SINUSOIDS, 'learned', 'none'],
  query_key_norm: [false],
  decoder_self_attention: ['attention'],
};
const ANY = [
  'architecture', 'vocab_size', 'source_vocab_size', 'd_model', 'encoder_layers', 'decoder_layers', 'heads',
  'key_value_heads', 'd_k', 'd_v', 'd_ff', 'norm_epsilon', 'norm_bias', 'first_norm', 'gated', 'attention_bias',
  'attention_output_bias', 'attention_scale', 'feed_forward_bias', 'output_bias', 'logit_scale', 'logit_cap', 'max_positions', 'first_position',
  'rotary_base', 'relative_buckets', 'relative_distance', 'tie_embeddings', 'scale_embeddings', 'embedding_scale', 'embedding_norm',
  'dropout', 'attention_dropout', 'activation_dropout', 'pad_id', 'bos_id', 'eos_id',
];

/** Why this config can't run here, in a sentence; null if it can. */
export function refusal(config) {
  for (const [name, value] of Object.entries(config)) {
    if (ANY.includes(name) || KNOWN[name]?.includes(value) || value === null) continue;
    return `The page can't compute a model with ${name} = ${JSON.stringify(value)}.`;
  }
  return null;
}

/** The ids that label a stack's rows: in an encoder the token read, in a decoder the token written from the row. ids:
 * with the start token. */
export const rowIds = (stack, ids) => (stack === 'decoder' ? ids.slice(1) : ids);

export class Twin {
  /** config: as in config.json. tensors: {name: {shape, data}}, as in model.safetensors. */
  constructor(config, tensors, switches = NOTHING_OFF) {
    const why = refusal(config);
    if (why) throw new RangeError(why);
    const weights = Object.entries(tensors).map(([name, { data }]) => [name, Float64Array.from(data)]);
    Object.assign(this, { config, weights: Object.fromEntries(weights), switches });
    this.hasEncoder = config.architecture !== 'decoder';
  }

  /** The same model with parts off, for the searches, which pass no switches on. */
  with(switches) {
    return Object.assign(Object.create(Twin.prototype), this, { switches });
  }

  /** {memory (S, D), logits} of an encoder's ids; logits only in an encoder-only model, an array per token.
   * watch(name, array, shape) is called at every point. */
  encode(ids, { switches = this.switches, watch } = {}) {
    const pass = new Pass(this, switches, watch);
    const memory = pass.encode(ids);
    return { memory, logits: this.config.architecture === 'encoder' ? pass.classify(memory) : null };
  }

  /** The logits after each of `ids`, an array each; memory: null for a decoder-only model. */
  decode(ids, memory, { switches = this.switches, watch } = {}) {
    const pass = new Pass(this, switches, watch);
    return pass.step(ids, pass.begin(memory));
  }

  /** The classifier's logits on rows of a stack, as if its last layer had written them. */
  read(stack, rows) {
    const pass = new Pass(this, this.switches);
    return pass.classify(pass.finalNorm(stack, rows));
  }

  /** The model for greedy search, sampling and beam search, as StepModel in the web page. memory: from `encode`, if
   * known. */
  async start(source, { memory = this.hasEncoder ? this.encode(source).memory : null, watch } = {}) {
    return new Decoder(this, memory, watch);
  }
}

class Decoder {
  constructor(model, memory, watch) {
    this.rest = model.rest;
    this.pass = new Pass(model, model.switches, watch);
    this.rows = [this.pass.begin(memory)];
  }

  /** Run the next tokens of each row; returns logits, an array per token, row by row. */
  async step(ids) {
    await this.rest?.();
    return this.rows.flatMap((past, row) => this.pass.step(ids[row], past));
  }

  /** Reorder the caches: row i continues from row rows[i]; the number of rows may grow. */
  async reorder(rows) {
    this.rows = rows.map((row) => ({ ...this.rows[row], own: [...this.rows[row].own] }));
  }

  dispose() {}
}

/** One run of the network; `watch`, if given, sees its points. */
class Pass {
  constructor({ config, weights, hasEncoder }, switches, watch) {
    Object.assign(this, { config, weights, hasEncoder, watch, off: { ...NOTHING_OFF, ...switches } });
  }

  /** Show a point with its rows' width; returns it. */
  see(name, x, width) {
    this.watch?.(name, x, [x.length / width, width]);
    return x;
  }

  /** Show a point (heads, rows, width). */
  seeHeads(name, x, heads, width) {
    this.watch?.(name, x, [heads, x.length / (heads * width), width]);
    return x;
  }

  encode(ids) {
    let x = this.embed('encoder', ids, 0);
    for (let i = 0; i < this.config.encoder_layers; i++) {
      const layer = `encoder.layers.${i}`;
      x = this.sublayer(`${layer}.self_attention`, x, (y) => {
        const name = `${layer}.self_attention`;
        const kv = this.seeKeysValues(name, this.keysValues(name, y));
        return this.attend(name, y, kv, false);
      });
      x = this.see(layer, this.feedForward(layer, x), this.config.d_model);
    }
    return this.finalNorm('encoder', x);
  }

  /** The decoding cache: the memory's keys and values, and in `own` those of its own tokens. */
  begin(memory) {
    const layers = Array.from({ length: this.config.decoder_layers }, (_, i) => `decoder.layers.${i}.cross_attention`);
    const none = { keys: new Float64Array(0), values: new Float64Array(0) };
    const cross = memory && layers.map((name) => this.seeKeysValues(name, this.keysValues(name, memory)));
    return { length: 0, own: layers.map(() => none), cross };
  }

  /** The logits after each of `ids`, which are added to `past`. */
  step(ids, past) {
    const { d_model: D, key_value_heads: K } = this.config;
    let x = this.embed('decoder', ids, past.length);
    for (let i = 0; i < this.config.decoder_layers; i++) {
      const layer = `decoder.layers.${i}`;
      x = this.sublayer(`${layer}.self_attention`, x, (y) => {
        const name = `${layer}.self_attention`;
        const { keys, values } = this.keysValues(name, y);
        const { keys: before, values: earlier } = past.own[i];
        past.own[i] = this.seeKeysValues(name, { keys: append(before, keys, K), values: append(earlier, values, K) });
        return this.attend(name, y, past.own[i], !this.off.mask);
      });
      if (this.hasEncoder) {
        const name = `${layer}.cross_attention`;
        x = this.sublayer(name, x, (y) => this.attend(name, y, past.cross[i], false));
      }
      x = this.see(layer, this.feedForward(layer, x), D);
    }
    past.length += ids.length;
    return this.classify(this.finalNorm('decoder', x));
  }

  /** Section 3.4, 3.5: embedding * sqrt(D) (or embedding_scale) + PE(position). */
  embed(stack, ids, first) {
    const { config: c, weights: w, off } = this;
    const D = c.d_model;
    const table = w['embedding.weight'] ?? w[stack === 'encoder' ? 'source_embedding.weight' : 'target_embedding.weight'];
    let x = new Float64Array(ids.length * D);
    ids.forEach((id, i) => x.set(table.subarray(id * D, (id + 1) * D), i * D));
    this.see(`${stack}.embedding.rows`, x, D);
    if (c.scale_embeddings) {
      const scale = Math.fround(c.embedding_scale ?? Math.sqrt(D));
      x = this.see(`${stack}.embedding.scaled`, x.map((value) => value * scale), D);
    }
    if (!off.positions && c.positions !== 'none') x = sum(x, this.positions(stack, ids.length, first));
    this.see(`${stack}.embedding`, x, D);
    if (!c.embedding_norm) return x;
    return this.see(`${stack}.embedding_norm`, this.norm(`${stack}.embedding_norm`, x), D);
  }

  /** The positional encoding to add from position `first` on, (L, D). */
  positions(stack, L, first) {
    const { config: c, weights: w } = this;
    const D = c.d_model;
    if (c.positions === 'learned') {
      const table = w[`${stack}.positions.weight`];
      if ((first + L) * D > table.length) throw new RangeError(`Position ${first + L} is past the model's ${table.length / D}: shorten the text.`);
      return table.subarray(first * D, (first + L) * D);
    }
    const PE = new Float64Array(L * D);
    const start = first + (c.first_position ?? 0);
    for (let i = 0; i < L; i++) PE.set(sinusoid(start + i, D, c.positions), i * D);
    return PE;
  }

  /** Section 3.1: LayerNorm(x + Sublayer(x)), or with norm_placement pre: x + Sublayer(LayerNorm(x)). */
  sublayer(name, x, compute) {
    const { config: c, off } = this;
    const D = c.d_model;
    const pre = c.norm_placement === 'pre';
    const first = c.first_norm === false && name === 'encoder.layers.0.self_attention';
    const read = pre && !first ? this.see(`${name}_norm`, this.norm(`${name}_norm`, x), D) : x;
    let y = compute(read);
    if (this.isOff(off.sublayers, name)) y = y.map(() => 0);
    this.see(name, y, D);
    const total = this.see(`${name}.residual`, off.residual ? y : sum(x, y), D);
    return pre ? total : this.see(`${name}_norm`, this.norm(`${name}_norm`, total), D);
  }

  isOff(listed, name) {
    return listed.some(([stack, layer, kind]) => `${stack}.layers.${layer}.${kind}` === name);
  }

  norm(name, x) {
    const { config: c, weights: w } = this;
    if (this.off.norm) return x;
    return norm(x, w[`${name}.weight`], w[`${name}.bias`], c.norm_epsilon, c.norm === 'layernorm');
  }

  finalNorm(stack, x) {
    if (this.config.norm_placement === 'post') return x;
    return this.see(`${stack}.norm`, this.norm(`${stack}.norm`, x), this.config.d_model);
  }

  linear(name, x, width) {
    return linear(x, this.weights[`${name}.weight`], this.weights[`${name}.bias`], width);
  }

  /** Keys (K, S, d_k) and values (K, S, d_v) of rows (S, D). */
  keysValues(name, x) {
    const { d_model: D, key_value_heads: K, d_k, d_v } = this.config;
    const keys = this.see(`${name}.key_proj`, this.linear(`${name}.key_proj`, x, D), K * d_k);
    const values = this.see(`${name}.value_proj`, this.linear(`${name}.value_proj`, x, D), K * d_v);
    return { keys: split(keys, K, d_k), values: split(values, K, d_v) };
  }

  seeKeysValues(name, kv) {
    const { key_value_heads: K, d_k, d_v } = this.config;
    this.seeHeads(`${name}.keys`, kv.keys, K, d_k);
    this.seeHeads(`${name}.values`, kv.values, K, d_v);
    return kv;
  }

  /** Section 3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W^O. causal: each of the last L positions sees
   * itself and earlier ones. */
  attend(name, x, { keys, values }, causal) {
    const { d_model: D, heads: H, key_value_heads: K, d_k, d_v, attention_scale: given } = this.config;
    const L = x.length / D;
    const S = keys.length / (K * d_k);
    const Q = split(this.see(`${name}.query_proj`, this.linear(`${name}.query_proj`, x, D), H * d_k), H, d_k);
    this.seeHeads(`${name}.queries`, Q, H, d_k);
    const scale = this.off.scale ? 1 : given ?? 1 / Math.sqrt(d_k);
    const scores = new Float64Array(H * L * S);
    const heads = new Float64Array(H * L * d_v);
    const of = (h) => Math.floor(h / (H / K)); // key/value head of query head h
    for (let h = 0; h < H; h++) {
      for (let i = 0; i < L; i++) {
        for (let j = 0; j < S; j++) {
          let product = 0;
          for (let k = 0; k < d_k; k++) product += Q[(h * L + i) * d_k + k] * keys[(of(h) * S + j) * d_k + k];
          scores[(h * L + i) * S + j] = product * scale;
        }
      }
    }
    this.seeHeads(`${name}.scores`, scores, H, S);
    const seen = causal ? scores.map((score, at) => (at % S > S - L + Math.floor(at / S) % L ? -Infinity : score)) : scores;
    const weights = this.seeHeads(`${name}.weights`, softmax(seen, S), H, S);
    for (let h = 0; h < H; h++) {
      if (this.isHeadOff(name, h)) continue;
      for (let i = 0; i < L; i++) {
        for (let j = 0; j < S; j++) {
          const weight = weights[(h * L + i) * S + j];
          for (let k = 0; k < d_v; k++) heads[(h * L + i) * d_v + k] += weight * values[(of(h) * S + j) * d_v + k];
        }
      }
    }
    const context = this.see(`${name}.context`, merge(heads, H, d_v), H * d_v);
    return this.linear(`${name}.output_proj`, context, H * d_v);
  }

  isHeadOff(name, head) {
    return this.isOff(this.off.heads.filter((each) => each[3] === head), name);
  }

  /** Section 3.3, equation 2: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, as a sub-layer. */
  feedForward(layer, x) {
    const { d_model: D, d_ff, gated, activation } = this.config;
    const name = `${layer}.feed_forward`;
    const act = ACTIVATIONS[activation];
    return this.sublayer(name, x, (y) => {
      const up = this.see(`${name}.up_proj`, this.linear(`${name}.up_proj`, y, D), d_ff);
      let inner = up;
      if (gated) {
        const gate = this.see(`${name}.gate_proj`, this.linear(`${name}.gate_proj`, y, D), d_ff);
        inner = gate.map((value, i) => act(value) * up[i]);
      } else {
        inner = up.map(act);
      }
      return this.linear(`${name}.down_proj`, this.see(`${name}.inner`, inner, d_ff), d_ff);
    });
  }

  /** The logits of each row: the last linear map of figure 1, its matrix shared with the embedding where tied. */
  classify(x) {
    const { config: c, weights: w } = this;
    const scale = Math.fround(c.logit_scale ?? 1);
    const tied = w['embedding.weight'] ?? w['target_embedding.weight'];
    let logits = linear(x.map((value) => value * scale), w['output_proj.weight'] ?? tied, w['output_proj.bias'], c.d_model);
    const cap = Math.fround(c.logit_cap ?? 0);
    if (cap) logits = logits.map((value) => cap * Math.tanh(value / cap));
    this.see('logits', logits, c.vocab_size);
    return Array.from({ length: logits.length / c.vocab_size }, (_, i) => logits.subarray(i * c.vocab_size, (i + 1) * c.vocab_size));
  }
}
