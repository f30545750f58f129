// A single file with the search inside: ids in, the best translations out, in one call.

import { rowsOf } from './attention.js';
import { lengthLimit } from './limits.js';
import { startOf } from './rules.js';
import { named } from './steps.js';

export class SearchModel {
  /** As in StepModel. */
  candidates = null;

  /** names: {search: {inputs, outputs}}, each {value: the graph's name}. */
  constructor(ort, { search }, config, names) {
    Object.assign(this, { ort, session: search, config, names: names.search });
  }

  /** The n best: [{ids, score}]. options: as in greedy search, sampling and beam search. */
  async search(source, { method, beam, lengthPenalty, temperature, topK, topP, seed, forced = [] }) {
    const { min_new_tokens: least, penalty_offset: offset, early_stopping: early } = this.config.generation;
    const sample = method === 'sample';
    const width = method === 'beam' ? beam : 1;
    const S = source.length;
    const int64 = (values, dims = []) => new this.ort.Tensor('int64', BigInt64Array.from(values, BigInt), dims);
    const float = (value) => new this.ort.Tensor('float32', [value], []);
    const bool = (value) => new this.ort.Tensor('bool', [value], []);
    const { sequences, lengths, scores, attention: read } = await this.#run({
      source_ids: int64(source, [1, S]),
      source_mask: int64(source.map(() => 1), [1, S]),
      beam: int64([width]),
      n_best: int64([width]),
      min_new_tokens: int64([least]),
      max_new_tokens: int64([lengthLimit(source, this.config)], [1]),
      length_penalty: float(lengthPenalty),
      penalty_offset: float(offset),
      early_stopping: bool(early),
      sample: bool(sample),
      temperature: float(sample ? temperature : 1),
      top_k: int64([sample ? topK : 0]),
      top_p: float(sample ? topP : 1),
      seed: int64([sample ? BigInt.asIntN(64, seed) : 0]),
      rows: int64([0], [1]),
      prefix: int64([], [1, 0]),
      start_id: int64([startOf(this.config)]),
      candidates: int64(this.candidates ?? [], [1, this.candidates?.length ?? 0]),
      forced_first: int64(forced, [forced.length]),
    });
    const T = sequences.dims[2];
    this.read = read && rowsOf(read, Number(lengths.data[0])); // of the best output
    return Array.from(lengths.data, (length, i) => ({
      ids: Array.from(sequences.data.subarray(i * T, i * T + Number(length)), Number),
      score: scores.data[i],
    })).filter(({ score }) => score > -5e8);
  }

  /** Run the graph: {value: tensor} in and out. */
  async #run(values) {
    const { inputs, outputs } = this.names;
    const found = await this.session.run(named(values, inputs));
    return Object.fromEntries(Object.entries(outputs).map(([value, name]) => [value, found[name]]));
  }

  /** The attention of the last search, whose best output is `ids`; as in StepModel. */
  async attention() {
    return this.read;
  }
}
