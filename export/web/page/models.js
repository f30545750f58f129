// Opens a model's files with onnxruntime-web.

import { fetched } from './files.js';
import { SearchModel } from './search.js';
import { StepModel, isKept } from './steps.js';

const memories = [];

/** Record every WebAssembly memory made after this call: their sizes tell a model's memory. */
export function watchMemory() {
  const { Memory } = WebAssembly;
  WebAssembly.Memory = new Proxy(Memory, {
    construct(target, given) {
      const made = new target(...given);
      memories.push(made);
      return made;
    },
  });
}

/** Bytes of WebAssembly memory. */
export const memoryInUse = () => memories.reduce((sum, { buffer }) => sum + buffer.byteLength, 0);

async function runtime(site, device, threads) {
  const build = device === 'webgpu' ? 'webgpu' : 'wasm';
  const ort = await import(new URL(`ort/ort.${build}.min.mjs`, site.base));
  ort.env.wasm.wasmPaths = new URL('ort/', site.base).href;
  ort.env.wasm.numThreads = threads;
  ort.env.logLevel = 'error';
  return ort;
}

/** Open one of the site's models: a StepModel or a SearchModel. heard(share): share of its files loaded, 0 to 1. */
export async function openModel(site, model, device, threads, heard) {
  const total = model.bytes;
  let arrived = 0;
  const more = (bytes) => heard((arrived += bytes) / total);
  const ort = await runtime(site, device, threads);
  const files = new Map(); // graphs may share a data file
  const once = (path) => files.get(path) ?? files.set(path, fetched(site, path, more)).get(path);
  const sessions = {};
  for (const [name, { graph, data }] of Object.entries(model.graphs)) {
    const externalData = await Promise.all(data.map(async (each) => ({
      path: each.name, data: await once(each.file),
    })));
    const options = { executionProviders: [device], externalData, logSeverityLevel: 3 };
    if (device === 'webgpu') options.preferredOutputLocation = cachesOnDevice(name, model);
    sessions[name] = await ort.InferenceSession.create(await fetched(site, graph, more), options);
  }
  const kind = model.kind === 'search' ? SearchModel : StepModel;
  return { model: new kind(ort, sessions, site.config, model.names), sessions: Object.values(sessions), threads: ort.env.wasm.numThreads };
}

/** Keep keys and values on the device. */
function cachesOnDevice(name, model) {
  if (name !== 'decoder') return {};
  const outputs = Object.entries(model.names.decoder.outputs);
  return Object.fromEntries(outputs.filter(([value]) => isKept(value)).map(([, name]) => [name, 'gpu-buffer']));
}
