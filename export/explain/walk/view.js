// What stations draw: one pass, and the chosen place in it.

import { Shape } from './pass.js';

/** The place to look first: the last places of the words in an example, {word, step}. */
export function placed({ pieces }, { word, step }, named) {
  const at = (all, text, otherwise) => (all.includes(text) ? all.lastIndexOf(text) : otherwise);
  return { word: at(pieces.source, named.word, word), step: at(pieces.written, named.step, step) };
}

/** The chosen place in a stack. state: {stack, word, step, layer, head, column, key, off, ...}. */
export function viewOf(model, pass, state, stack = null) {
  const { config } = pass;
  const both = config.architecture === 'encoder-decoder';
  const at = stack ?? (both ? state.stack : config.architecture);
  const outStack = config.architecture === 'encoder' ? 'encoder' : 'decoder';
  const shape = new Shape(config, at);
  const reads = { encoder: pass.tokens.source, decoder: pass.tokens.target };
  const pieces = { encoder: pass.pieces.source, decoder: pass.pieces.target };
  const labels = { encoder: pass.pieces.source, decoder: pass.pieces.written };
  const clip = (n, count) => Math.max(0, Math.min(n, count - 1));
  const place = (each) => clip(each === 'decoder' ? state.step : state.word, reads[each].length);
  const i = place(at);
  const name = (each) => (each === 'decoder' ? `while writing ‹${labels.decoder[place(each)]}›` : `‹${labels.encoder[place(each)]}›`);
  const outI = config.architecture === 'encoder' ? place('encoder') : place('decoder');
  const l = clip(state.layer, shape.layers);
  const h = clip(state.head, shape.heads);
  const parts = state.off.parts ?? [];
  return {
    model, pass, shape, stack: at, i, l, h,
    c: state.column, key: state.key, large: state.large, width: state.width, temperature: state.temperature, topK: state.topK, beam: state.beam, alpha: state.alpha,
    ids: reads[at], read: pieces[at], labels: labels[at], who: name(at), source: pass.pieces.source,
    vocabulary: at === 'encoder' ? config.source_vocab_size ?? model.vocabulary : model.vocabulary,
    scaled: config.scale_embeddings !== false, off: state.off, live: model.live,
    weights: model.live ? model.weights : null,
    parameter: (wanted) => model.parameters[wanted] ?? null,
    text: (id) => model.text(id),
    out: { stack: outStack, i: outI, shape: new Shape(config, outStack) },
    outLabels: labels[outStack], outRead: pieces[outStack], outMatrix: model.spec.classifier,
    written: config.architecture === 'encoder' ? pass.tokens.source : pass.tokens.written,
    step: outI, output: pass.output, hasRow: (point, n) => !pass.points[point].rows || pass.points[point].rows.includes(n),
    headOff: (part) => state.off.parts?.some((each) => each.length === 4 && each[0] === at && each[1] === l && each[2] === part && each[3] === h),
    sublayerOff: (part) => parts.some((each) => each.length === 3 && each[0] === at && each[1] === l && each[2] === part),
    at: (other) => viewOf(model, pass, state, other),
  };
}
