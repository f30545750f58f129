// The encoder and the decoder with its cache, a step at a time: what greedy search, sampling and beams are made of.

import { rowsOf } from './attention.js';

/** rows of a tensor's data, each `size` numbers, in another order or several times. */
function gathered(data, size, rows) {
  const found = new Float32Array(rows.length * size);
  rows.forEach((row, i) => found.set(data.subarray(row * size, (row + 1) * size), i * size));
  return found;
}

export class StepModel {
  /** sessions: {encoder, decoder} of ONNX Runtime. */
  constructor(ort, sessions, config) {
    Object.assign(this, { ort, config, ...sessions });
  }

  async start(source) {
    const S = source.length;
    const mask = this.int64(source.map(() => 1), [1, S]);
    const found = await this.encoder.run({ input_ids: this.int64(source, [1, S]), attention_mask: mask });
    return new Decoder(this, found.last_hidden_state, mask);
  }

  /** How much of each source token was read when each of `ids` was chosen: an array for each of them. */
  async attention(source, ids) {
    const decoder = await this.start(source);
    try {
      const given = [this.config.bos_id, ...ids.slice(0, -1)];
      const { cross_attention: read } = await this.decoder.run(decoder.feeds([given]), ['cross_attention']);
      return rowsOf(read, ids.length);
    } finally {
      decoder.dispose();
    }
  }

  int64(values, dims) {
    return new this.ort.Tensor('int64', BigInt64Array.from(values, BigInt), dims);
  }
}

class Decoder {
  constructor(model, memory, mask) {
    Object.assign(this, { model, memory, mask, rows: 1, begun: false });
    const { inputMetadata: inputs, outputNames: outputs } = model.decoder;
    const past = inputs.filter(({ name }) => name.startsWith('past_key_values.'));
    const empty = ({ name, shape }) => [name, new model.ort.Tensor('float32', [], [1, shape[1], 0, shape[3]])];
    this.past = Object.fromEntries(past.map(empty));
    // Keys and values of the source are computed in the first step, and don't change.
    const needed = outputs.filter((name) => name === 'logits' || name.startsWith('present.'));
    this.fetched = [needed, needed.filter((name) => !name.includes('.encoder.'))];
  }

  feeds(ids) {
    const { model, rows, begun } = this;
    return {
      ...this.past,
      input_ids: model.int64(ids.flat(), [rows, ids[0].length]),
      encoder_hidden_states: this.memory,
      encoder_attention_mask: this.mask,
      use_cache_branch: new model.ort.Tensor('bool', [begun], [1]),
    };
  }

  /** The next tokens of each row, each an array of equal length -> logits, an array for each of them, row by row. */
  async step(ids) {
    const { logits, ...present } = await this.model.decoder.run(this.feeds(ids), this.fetched[Number(this.begun)]);
    for (const [name, tensor] of Object.entries(present)) this.#keep(name.replace('present', 'past_key_values'), tensor);
    this.begun = true;
    const V = logits.dims[2];
    const data = await logits.getData(true);
    return Array.from({ length: data.length / V }, (_, i) => data.subarray(i * V, (i + 1) * V));
  }

  /** Row i goes on from row rows[i]; there may be more of them than before. */
  async reorder(rows) {
    if (rows.length === this.rows && rows.every((row, i) => row === i)) return;
    const more = rows.length !== this.rows;
    for (const [name, tensor] of Object.entries(this.past)) {
      // All rows have the same source.
      if (more || name.includes('.decoder.')) this.#keep(name, await this.#gathered(tensor, rows));
    }
    if (more) [this.memory, this.mask] = [await this.#gathered(this.memory, rows), await this.#tiled(this.mask, rows)];
    this.rows = rows.length;
  }

  /** Gives back what a graphics card holds. */
  dispose() {
    for (const tensor of Object.values(this.past)) tensor.dispose();
  }

  async #gathered(tensor, rows) {
    const dims = [rows.length, ...tensor.dims.slice(1)];
    const data = gathered(await tensor.getData(), tensor.size / tensor.dims[0], rows);
    return new this.model.ort.Tensor('float32', data, dims);
  }

  #tiled(mask, rows) {
    const row = Array.from(mask.data).slice(0, mask.dims[1]);
    return this.model.int64(rows.flatMap(() => row), [rows.length, row.length]);
  }

  #keep(name, tensor) {
    if (this.past[name] !== tensor) this.past[name]?.dispose();
    this.past[name] = tensor;
  }
}
