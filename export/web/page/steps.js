// The encoder and the cached decoder, one step at a time: the model for greedy search, sampling and beam search.

import { rowsOf } from './attention.js';
import { startOf } from './rules.js';
import { BANNED } from './sampling.js';

/** Rows of a tensor's data (`size` numbers each) by index, in any order or several times. */
function gathered(data, size, rows) {
  const found = new Float32Array(rows.length * size);
  rows.forEach((row, i) => found.set(data.subarray(row * size, (row + 1) * size), i * size));
  return found;
}

/** Keys and values, or SSRU states, are passed from step to step. */
export const isKept = (value) => value.startsWith('cache.') || value.startsWith('cross.');

/** A graph's inputs out of {value: tensor}, under the graph's own names: {value: name}. */
export function named(values, names) {
  return Object.fromEntries(Object.entries(names).map(([value, name]) => [name, values[value]]));
}

export class StepModel {
  /** The ids allowed in an output, in addition to ends and forced ids; null: all. */
  candidates = null;

  /** sessions: {encoder, decoder} of ONNX Runtime. names: {encoder, decoder}, each {inputs, outputs} as {value: name}. */
  constructor(ort, sessions, config, names) {
    Object.assign(this, { ort, config, names, ...sessions });
  }

  async start(source) {
    const S = source.length;
    const { inputs, outputs } = this.names.encoder;
    const mask = this.int64(source.map(() => 1), [1, S]);
    const found = await this.encoder.run(named({ source_ids: this.int64(source, [1, S]), source_mask: mask }, inputs));
    return new Decoder(this, found[outputs.memory], mask);
  }

  /** Attention to each source token when each of `ids` was chosen: an array per id. */
  async attention(source, ids) {
    const decoder = await this.start(source);
    try {
      const given = [startOf(this.config), ...ids.slice(0, -1)];
      const { attention } = await decoder.run([given], ['attention']);
      return rowsOf(attention, ids.length);
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
    Object.assign(this, { model, memory, mask, rows: 1, begun: false, length: 0 });
    const { inputs, outputs } = model.names.decoder;
    const shapes = Object.fromEntries(model.decoder.inputMetadata.map(({ name, shape }) => [name, shape]));
    const zeros = (D) => new model.ort.Tensor('float32', new Float32Array(D), [1, D]);
    const none = (K, d) => new model.ort.Tensor('float32', [], [1, K, 0, d]);
    const empty = ([, K, , d]) => (d === undefined ? zeros(K) : none(K, d)); // an SSRU state, or keys and values
    this.past = Object.fromEntries(Object.keys(inputs).filter(isKept).map((value) => [value, empty(shapes[inputs[value]])]));
    // The source's keys and values are computed in the first step, and don't change.
    const needed = Object.keys(outputs).filter((value) => value === 'logits' || isKept(value));
    this.fetched = [needed, needed.filter((value) => !value.startsWith('cross.'))];
  }

  /** One run on these tokens: {value: tensor} of the requested outputs. */
  async run(ids, wanted) {
    const { model, rows, begun, length } = this;
    const { inputs, outputs } = model.names.decoder;
    const L = ids[0].length;
    const values = {
      ...this.past,
      target_ids: model.int64(ids.flat(), [rows, L]),
      positions: model.int64(ids.flatMap((row) => row.map((_, i) => length + i)), [rows, L]),
      memory: this.memory,
      source_mask: this.mask,
      later: new model.ort.Tensor('bool', [begun], [1]),
    };
    const found = await model.decoder.run(named(values, inputs), wanted.map((value) => outputs[value]));
    return Object.fromEntries(wanted.map((value) => [value, found[outputs[value]]]));
  }

  /** Run the next tokens of each row, arrays of equal length; returns logits, an array per token, row by row. */
  async step(ids) {
    const { logits, ...kept } = await this.run(ids, this.fetched[Number(this.begun)]);
    for (const [value, tensor] of Object.entries(kept)) this.#keep(value, tensor);
    this.begun = true;
    this.length += ids[0].length;
    const V = logits.dims[2];
    const data = await logits.getData(true);
    const found = Array.from({ length: data.length / V }, (_, i) => data.subarray(i * V, (i + 1) * V));
    const bans = this.model.candidates && new Float32Array(V).fill(BANNED);
    for (const id of this.model.candidates ?? []) bans[id] = 0;
    return bans ? found.map((row) => row.map((logit, id) => logit + bans[id])) : found;
  }

  /** Reorder the caches: row i continues from row rows[i]; the number of rows may grow. */
  async reorder(rows) {
    if (rows.length === this.rows && rows.every((row, i) => row === i)) return;
    const more = rows.length !== this.rows;
    for (const [value, tensor] of Object.entries(this.past)) {
      // All rows have the same source.
      if (more || value.startsWith('cache.')) this.#keep(value, await this.#gathered(tensor, rows));
    }
    if (more) [this.memory, this.mask] = [await this.#gathered(this.memory, rows), await this.#tiled(this.mask, rows)];
    this.rows = rows.length;
  }

  /** Free memory on the graphics card. */
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

  #keep(value, tensor) {
    if (this.past[value] !== tensor) this.past[value]?.dispose();
    this.past[value] = tensor;
  }
}
