// Reads safetensors files (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON header,
// the header, the numbers in little endian.

const INFINITE = 31; // the exponent of float16's infinities

/** The float16 number of these 16 bits. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = (bits & 1023) / 1024;
  if (exponent === INFINITE) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14);
}

const READ = {
  F16: [2, (view, at) => half(view.getUint16(at, true))],
  F32: [4, (view, at) => view.getFloat32(at, true)],
};

/** {name: {shape, data}} of the file's bytes (an ArrayBuffer), data as float64. */
export function readTensors(buffer) {
  const view = new DataView(buffer);
  const begin = 8 + Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, begin - 8)));
  delete header.__metadata__;
  const read = ([name, { dtype, shape, data_offsets: [from, to] }]) => {
    if (!READ[dtype]) throw new RangeError(`The page can't read numbers of kind ${dtype} (${name}).`);
    const [size, number] = READ[dtype];
    const data = Float64Array.from({ length: (to - from) / size }, (_, i) => number(view, begin + from + i * size));
    return [name, { shape, data }];
  };
  return Object.fromEntries(Object.entries(header).map(read));
}
