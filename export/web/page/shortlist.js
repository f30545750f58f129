// Marian's shortlists: the tokens allowed in a sentence's translation. As mlx_transformer/core/shortlist.py.

const HEADER = 48; // bytes
const MULTIPLE = 8;

export class Shortlist {
  /** bytes: the file's contents. shared: whether source ids are target ids too. */
  constructor(bytes, shared) {
    const view = new DataView(bytes.buffer, bytes.byteOffset);
    const number = (at) => Number(view.getBigUint64(at, true));
    const [words, entries] = [number(32), number(40)];
    const ids = HEADER + 8 * words;
    Object.assign(this, { shared, first: number(16) });
    this.offsets = Float64Array.from({ length: words }, (_, i) => number(HEADER + 8 * i));
    this.ids = Uint32Array.from({ length: entries }, (_, i) => view.getUint32(ids + 4 * i, true));
  }

  /** The candidates for a source's ids, ascending; `size`: the vocabulary's size. */
  candidates(source, size) {
    const chosen = new Uint8Array(size).fill(1, 0, this.first);
    for (const id of source) {
      if (this.shared) chosen[id] = 1;
      if (id < this.offsets.length - 1) { // padding has no list
        for (const token of this.ids.subarray(this.offsets[id], this.offsets[id + 1])) chosen[token] = 1;
      }
    }
    const count = chosen.reduce((sum, each) => sum + each, 0);
    let missing = (MULTIPLE - count % MULTIPLE) % MULTIPLE;
    for (let id = this.first; id < size && missing; id++) {
      if (!chosen[id]) missing -= (chosen[id] = 1);
    }
    return Array.from(chosen.keys()).filter((id) => chosen[id]);
  }
}
