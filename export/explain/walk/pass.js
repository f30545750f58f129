// One pass through a model, computed or recorded: its tokens, and the value of every named point.

export class Missing extends Error {}

/** points: {name: {data, shape}} without the batch axis. A point's `rows`: the recorded positions. */
export class Pass {
  /** tokens: {source, target, written}, ids; pieces: the same as text. */
  constructor(config, points, tokens, pieces, rest = {}) {
    Object.assign(this, { config, points, tokens, pieces, ...rest });
    this.epsilon = config.norm_epsilon ?? 1e-5;
  }

  has(name) {
    return name in this.points;
  }

  shape(name) {
    return this.point(name).shape;
  }

  /** A point's value. Throws `Missing` if the pass lacks it: fused operators hide some points. */
  point(name) {
    if (!(name in this.points)) throw new Missing(name);
    return this.points[name];
  }

  /** The last axis at an index of the other axes: an array. */
  row(name, ...index) {
    const { data, shape, rows } = this.point(name);
    const width = shape.at(-1);
    const axis = shape.length - 2; // the axis of positions
    const place = index.reduce((sum, i, n) => (rows && n === axis ? sum * rows.length + rows.indexOf(i) : sum * shape[n] + i), 0);
    return data.subarray(place * width, (place + 1) * width);
  }

  at(name, ...index) {
    return this.row(name, ...index.slice(0, -1))[index.at(-1)];
  }
}

/** Names of points and sizes in one stack, from the config. */
export class Shape {
  constructor(config, stack) {
    const own = stack === 'decoder' ? { ...config, ...config.decoder } : config;
    Object.assign(this, { config, stack, post: config.norm_placement === 'post' });
    this.d = config.d_model;
    this.heads = own.heads;
    this.kvHeads = own.key_value_heads ?? own.heads;
    this.dk = own.d_k ?? this.d / own.heads;
    this.dv = own.d_v ?? this.d / own.heads;
    this.layers = config[`${stack}_layers`];
    this.inner = own.d_ff;
    this.gated = own.gated;
    this.activation = own.activation ?? 'relu';
    this.rms = config.norm === 'rmsnorm';
  }

  /** A layer's window, if it doesn't see all keys. */
  window(n) {
    const pattern = this.config.layer_pattern ?? [];
    const own = pattern.length ? pattern[n % pattern.length] : {};
    return 'window' in own ? own.window : this.config.window;
  }

  layer(n) {
    return `${this.stack}.layers.${n}`;
  }

  parts() {
    return ['self_attention', ...(this.stack === 'decoder' && this.config.architecture === 'encoder-decoder' ? ['cross_attention'] : []), 'feed_forward'];
  }

  embedding() {
    return this.config.embedding_norm ? `${this.stack}.embedding_norm` : `${this.stack}.embedding`;
  }

  /** The input of layer n, and of a sub-layer in it. */
  stream(n, part = 'self_attention') {
    const at = this.parts().indexOf(part);
    if (at === 0) return n === 0 ? this.embedding() : this.layer(n - 1);
    const before = `${this.layer(n)}.${this.parts()[at - 1]}`;
    return this.post ? `${before}_norm` : `${before}.residual`;
  }

  /** A sub-layer's input: the stream, or its norm if norms come first. */
  input(n, part) {
    const norm = `${this.layer(n)}.${part}_norm`;
    const bare = this.config.first_norm === false && this.stack === 'encoder' && n === 0 && part === 'self_attention';
    return this.post || bare || this.config.norm_placement === 'after' ? this.stream(n, part) : norm;
  }

  /** The classifier's input. */
  last() {
    return this.post ? this.layer(this.layers - 1) : `${this.stack}.norm`;
  }
}

export const softmax = (values) => {
  const most = Math.max(...values);
  const e = Array.from(values, (v) => Math.exp(v - most));
  const total = e.reduce((a, b) => a + b, 0);
  return e.map((v) => v / total);
};

export const bits = (weights) => -weights.reduce((sum, w) => sum + (w > 0 ? w * Math.log2(w) : 0), 0);
export const dot = (a, b) => { let sum = 0; for (let i = 0; i < a.length; i++) sum += a[i] * b[i]; return sum; };
export const mostOf = (values) => values.reduce((best, v, i) => (v > values[best] ? i : best), 0);
