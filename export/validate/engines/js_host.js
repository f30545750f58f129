// Holds a model of the page's own engine (explain/live/twin.js) for js_engine.py: a JSON request a line on standard input,
// a JSON answer a line on standard output. Arrays are float64, in base64.
// node js_host.js FOLDER_OF_THE_SCRIPTS, then the requests {config, file}, {points}, {start}, {step}, {reorder}

const packed = (data, shape) => ({ shape, data: Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString('base64') });
const rows = (found) => packed(Float64Array.from(found.flatMap((row) => Array.from(row))), [found.length, found[0].length]);

async function main() {
  // By import(), which is there whatever kind of script a package.json in a folder above says this is.
  const [fs, path, readline, url] = await Promise.all(['fs', 'path', 'readline', 'url'].map((name) => import(`node:${name}`)));
  const from = (file) => import(url.pathToFileURL(path.join(process.argv[2], file)));
  const [{ Twin }, { readTensors }] = [await from('twin.js'), await from('safetensors.js')];
  const decoders = [];
  let model = null;

  /** Every point of one pass over a row's ids, in chunks of the target where there are any. */
  async function points({ source, chunks }) {
    const found = {};
    const watch = (name, data, shape) => (found[name] ??= []).push(packed(data, shape));
    const encoded = source && model.encode(source, { watch });
    if (chunks) {
      const decoder = await model.start(source ?? [], { memory: encoded?.memory ?? null, watch });
      for (const ids of chunks) await decoder.step([ids]);
    }
    return found;
  }

  const answers = {
    open({ config, file }) {
      const { buffer, byteOffset, byteLength } = fs.readFileSync(file);
      model = new Twin(config, readTensors(buffer.slice(byteOffset, byteOffset + byteLength)));
      return { node: process.versions.node };
    },
    weights: () => Object.fromEntries(Object.entries(model.weights).map(([name, data]) => [name, packed(data, [data.length])])),
    points,
    async start({ sources }) {
      const all = await Promise.all(sources.map((source) => model.start(source)));
      all[0].rows = all.flatMap((each) => each.rows);
      return { decoder: decoders.push(all[0]) - 1 };
    },
    async step({ decoder, ids }) {
      const found = await decoders[decoder].step(ids);
      let end = 0;
      return rows(ids.map(({ length }) => found[(end += length) - 1])); // after the last one of each
    },
    async reorder({ decoder, order }) {
      await decoders[decoder].reorder(order);
      return {};
    },
  };

  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { kind, ...request } = JSON.parse(line);
    let answer;
    try {
      answer = await answers[kind](request);
    } catch (error) {
      answer = { error: error.message };
    }
    process.stdout.write(`${JSON.stringify(answer)}\n`);
  }
}

main();
