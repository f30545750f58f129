// The page: a sentence, the stack, the stations. Choosing, typing and switching redraws all of it.

import { columnOf, escaped, key, listen, short } from '../../../mlx_transformer/page/kit.js';
import { cell, cross, heads, looksAt, mixed, qkv, attentionOf } from './attention_stations.js';
import { lanes } from './bar.js';
import { breaking, eachInTurn, seen, switchesOf } from './breaking.js';
import { position, row, token } from './first_stations.js';
import { feedForward, next, norm } from './layer_stations.js';
import { Live } from './models.js';
import { others } from './others.js';
import { logits, search } from './output_stations.js';
import { readLink, writeLink } from './link.js';
import { Missing } from './pass.js';
import { Tour } from './tour.js';
import { placed, viewOf } from './view.js';
import { entry, footer, words } from './words.js';

const data = JSON.parse(document.getElementById('walk-data').textContent);
const find = (id) => document.getElementById(id);
const opened = new Map(); // models, opened at first use
export const modelOf = (n) => {
  if (!opened.has(n)) opened.set(n, data.models[n].weights ? new Live(data.models[n]) : new others.Recorded(data.models[n]));
  return opened.get(n);
};
const START = { model: 0, text: '', stack: 'encoder', word: 0, step: 0, layer: 0, head: 0, column: 0, key: null, temperature: 1, beam: 4, alpha: 0.6, off: {} };
const state = { ...START, text: data.models[0].examples[0].text, ...data.models[0].examples[0].at };
let [model, whole, pass, station, tree, breakage, turns] = [null, null, null, 'token', null, '', ''];
let wanted = data.models[0].examples[0].find ?? {}; // words to look at first
let drawn = 0; // passes so far: late results of earlier ones are dropped

const stationsOf = ({ architecture }) => [
  token, row, position, qkv, cell, mixed, heads, norm, feedForward, next,
  ...(architecture === 'encoder-decoder' ? [cross] : []), logits, ...(architecture === 'encoder' ? [] : [search]),
  ...(model.live ? [breaking] : []),
].map((each) => (!model.live && others.stations[each.id]) || each);
/** A station's text, with the variant for this kind of model. */
const saidOf = (id) => Object.assign({}, data.words.stations[id], ...(model.live ? [model.config.positions] : others.kindsOf(model.spec)).map((kind) => data.words[kind]?.[id]));
/** A station's answer, with the model's own sizes in it. */
const answer = ({ id }, { shape }) => words(saidOf(id).answer.replaceAll('{heads}', shape.heads).replaceAll('{dk}', shape.dk)
  .replaceAll('{root}', short(Math.sqrt(shape.dk), 4)));
const view = () => ({ ...viewOf(model, pass, state), tree, seen: breakage, turns, said: data.words });

function frame() {
  const v = view();
  find('stations').innerHTML = stationsOf(model.config).map((each, n) => [each, n, saidOf(each.id)]).map(([each, n, said]) => (
    `<section id="${each.id}" class="station" aria-labelledby="${each.id}-title"><h2 id="${each.id}-title"><span>${n + 1}</span> ${said.title}</h2>`
    + `<p class="formula"></p><div class="body"></div><div class="controls">${each.controls?.(v) ?? ''}</div>`
    + `<div class="answer"><h3>${escaped(said.question)}</h3><p></p></div><p class="ask"><b>Try:</b> ${escaped(said.ask)}</p>`
    + `<details class="numbers"><summary>the numbers as a table</summary></details>`
    + `<p class="links">${footer(said, data.links)}</p></section>`)).join('');
  observe();
}

/** A station's content, or a line if the pass lacks its numbers. */
function bodyOf(shown, v) {
  try {
    return shown.body(v);
  } catch (error) {
    if (!(error instanceof Missing)) throw error;
    return `<p>This model shows no ${escaped(error.message)}.</p>`;
  }
}

function fill(only = null) {
  const v = view();
  for (const each of stationsOf(model.config)) {
    if (only && !only.includes(each.id)) continue;
    const section = find(each.id);
    const focused = section.querySelector('.body').contains(document.activeElement)
      ? [...section.querySelectorAll('.body button, .body summary, .body [tabindex]')].indexOf(document.activeElement) : -1;
    const folds = [...section.querySelectorAll('.body details')].map(({ open }) => open);
    section.querySelector('.formula').innerHTML = each.formula(v);
    section.querySelector('.answer p').innerHTML = answer(each, v);
    section.querySelector('.body').innerHTML = bodyOf(each, v);
    const now = section.querySelectorAll('.body details');
    if (now.length === folds.length) now.forEach((fold, n) => { fold.open = folds[n]; });
    section.querySelectorAll('.numbers table, .numbers .wide').forEach((old) => old.remove());
    section.querySelector('.numbers').open = false;
    if (focused >= 0) section.querySelectorAll('.body button, .body summary, .body [tabindex]')[focused]?.focus({ preventScroll: true });
  }
  top(v);
}

const chip = (text, small, on, kind, n) => (
  `<button type="button" class="chip${on ? ' on' : ''}" data-${kind}="${n}" aria-pressed="${on}"><span class="tok">${escaped(text)}</span>${small ? `<small>${escaped(small)}</small>` : ''}</button>`);

function top(v) {
  const { architecture } = model.config;
  const lines = [];
  if (architecture !== 'decoder') lines.push(['reads', pass.pieces.source.map((text, n) => chip(text, '', v.stack === 'encoder' && n === v.i, 'word', n))]);
  if (architecture !== 'encoder') {
    lines.push(['while writing', pass.pieces.written.map((text, n) => chip(text, `has read ${pass.pieces.target[n]}`, n === v.step && (v.stack === 'decoder' || architecture === 'encoder-decoder'), 'step', n))]);
  }
  find('chips').innerHTML = lines.map(([name, chips]) => `<div class="line"><span>${name}</span><div class="chips" role="group" aria-label="${name}">${chips.join('')}</div></div>`).join('');
  find('lanes').innerHTML = lanes(v, station);
  const pick = (name, count, chosen) => `<span class="pick" role="group" aria-label="${name}">${name} ${Array.from({ length: count }, (_, n) => (
    `<button type="button" data-${name}="${n}" aria-pressed="${n === chosen}">${n + 1}</button>`)).join('')}</span>`;
  find('picks').innerHTML = pick('layer', v.shape.layers, v.l) + pick('head', v.shape.heads, v.h)
    + (architecture === 'encoder-decoder' ? `<span class="pick" role="group" aria-label="stack">${['encoder', 'decoder'].map((stack) => (
      `<button type="button" data-stack="${stack}" aria-pressed="${stack === v.stack}">${stack}</button>`)).join('')}</span>` : '');
  const part = `${v.shape.layer(v.l)}.self_attention`;
  find('said').innerHTML = pass.has(`${part}.weights`) ? `${looksAt(v, attentionOf(v, 'self_attention'))} (layer ${v.l + 1}, head ${v.h + 1})` : '';
  writeLink(state, START);
}

function headline() {
  find('output').textContent = pass.output ? `→ ${pass.output}` : '';
  const off = [...Object.keys(state.off).filter((name) => name !== 'parts'), ...(state.off.parts?.length ? ['a part'] : [])];
  find('broken').hidden = !off.length;
  find('broken').textContent = off.length ? `off: ${off.join(', ')}` : '';
}

/** Read the text with the parts switched off, and draw everything. `anew`: another text or model. */
async function read(anew) {
  const mine = ++drawn;
  delete document.documentElement.dataset.ready;
  try {
    if (anew) {
      const fresh = model !== modelOf(state.model);
      model = modelOf(state.model);
      const found = await model.read(state.text);
      if (mine !== drawn) return;
      whole = found;
      Object.assign(state, placed(whole, state, wanted));
      wanted = {};
      turns = '';
      if (fresh) { pass = whole; frame(); }
    }
    const switches = switchesOf(state.off);
    const changed = Object.keys(state.off).length > 0;
    const { text, output, logP, given } = whole;
    pass = changed && model.live ? model.pass(whole.tokens, switches, { text, output, logP, given }) : whole;
    [tree, breakage] = [null, ''];
    find('wrong').textContent = '';
    headline();
    fill();
    if (!model.live) return ready();
    if (changed && model.config.architecture !== 'encoder') {
      const now = await model.written(state.text, switches);
      if (mine !== drawn) return;
      find('output').textContent = `→ ${now.output || '(nothing)'}`;
    }
    breakage = await seen(model, whole, state.off, data.words.surer);
    if (mine !== drawn) return;
    fill(['break']);
    if (model.config.architecture !== 'encoder') await grow(mine);
    if (mine !== drawn) return;
    dispatchEvent(new CustomEvent('walked', { detail: { model, pass, tree, whole: !changed } })); // for following.js
    ready();
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    find('wrong').textContent = error.message;
    ready();
  }
}

/** Draw everything that depends on the text. */
const ready = () => { document.documentElement.dataset.ready = String(drawn); };

async function grow(mine = drawn) {
  const found = await model.tree(state.text, switchesOf(state.off), state.beam, state.alpha);
  if (mine !== drawn) return;
  tree = found;
  fill(['search']);
}

function choose(changes) {
  Object.assign(state, changes);
  fill();
}

/** Actions of clicks, by the button's data. */
const CHOICES = {
  word: (n) => (model.config.architecture === 'decoder' ? CHOICES.step(n) : choose({ word: Number(n), stack: 'encoder', key: null })),
  step: (n) => choose({ step: Number(n), stack: 'decoder', key: null }),
  layer: (n) => choose({ layer: Number(n), key: null }),
  head: (n) => choose({ head: Number(n), key: null }),
  stack: (stack) => choose({ stack, key: null }),
  key: (n) => choose({ key: Number(n) }),
};

function clicked({ target, clientX }) {
  const row = target.closest('.strip i');
  if (row) return choose({ column: columnOf(row, clientX) });
  const button = target.closest('button');
  if (!button) return undefined;
  const { go, stack, layer, gl, example, model: other } = button.dataset;
  if (gl) return gloss(button);
  if (example !== undefined) return open(data.models[state.model].examples[Number(example)]);
  if (other !== undefined) { state.model = Number(other); Object.assign(state, { off: {} }); tabs(); return open(data.models[state.model].examples[0]); }
  if (button.id === 'all-on') { find('part').value = ''; document.querySelectorAll('[data-off]').forEach((box) => { box.checked = false; }); state.off = {}; return read(false); }
  if (button.id === 'try-all') { turns = eachInTurn(model, whole); return fill(['break']); }
  if (button.id === 'tour-start') return tour.start();
  if (button.id === 'copy') return navigator.clipboard?.writeText(location.href).then(() => { find('said').textContent = 'The link is copied.'; }, () => {});
  if (go || (stack && layer)) {
    choose({ ...(stack ? { stack } : {}), ...(layer === undefined ? {} : { layer: Number(layer) }), key: null });
    return go && show(go);
  }
  const choice = Object.keys(CHOICES).find((name) => name in button.dataset);
  return choice && (choice === 'step' || choice === 'word') && button.closest('#token') && state.stack === 'decoder'
    ? CHOICES.step(button.dataset.word) : choice && CHOICES[choice](button.dataset[choice]);
}

function open({ text, at, find: named }) {
  Object.assign(state, { word: 0, step: 0, layer: 0, head: 0, key: null, ...at, text });
  wanted = named ?? {};
  find('text').value = text;
  return read(true);
}

function changed({ target }) {
  if (target.dataset.off) {
    const { [target.dataset.off]: _, ...rest } = state.off;
    state.off = target.checked ? { ...rest, [target.dataset.off]: true } : rest;
    return read(false);
  }
  if (target.id === 'part') {
    const { parts: _, ...rest } = state.off;
    const part = target.value.split(',').map((each) => (/^\d+$/.test(each) ? Number(each) : each));
    state.off = target.value ? { ...rest, parts: [part] } : rest;
    return read(false);
  }
  if (target.id === 'beam-size') { state.beam = Number(target.value); return grow(); }
  return undefined;
}

function slid({ target }) {
  if (target.id === 'text') { state.text = target.value; return target.value.trim() && read(true); }
  if (target.id !== 'temperature' && target.id !== 'alpha') return undefined;
  state[target.id] = Number(target.value);
  target.nextElementSibling.textContent = target.value;
  return target.id === 'alpha' ? grow() : fill(['logits']);
}

function pressed(event) {
  if (event.key === 'Escape') find('gloss').hidden = true;
  if (event.target.closest('input, select, textarea, .wide, #tour') || event.ctrlKey || event.metaKey || event.altKey) return;
  const v = viewOf(model, pass, state);
  const beside = { ',': -1, '.': 1 }[event.key];
  if (beside) choose({ column: Math.max(0, Math.min(v.shape.d - 1, state.column + beside)) });
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!by) return;
  const upright = event.key === 'ArrowUp' || event.key === 'ArrowDown';
  if (upright && !event.shiftKey) return; // these keys scroll
  const within = (n, count) => Math.max(0, Math.min(count - 1, n));
  event.preventDefault();
  if (upright) choose({ layer: within(v.l + by, v.shape.layers), key: null });
  else if (event.shiftKey) choose({ head: within(v.h + by, v.shape.heads), key: null });
  else choose({ [v.stack === 'decoder' ? 'step' : 'word']: within(v.i + by, v.ids.length), key: null });
}

const explained = (term) => entry(term, data.words.glossary[term], data.links);

function gloss(button) {
  const place = find('gloss');
  place.innerHTML = explained(button.dataset.gl);
  place.hidden = false;
  const box = button.getBoundingClientRect();
  place.style.left = `${Math.max(8, Math.min(innerWidth - 316, box.left))}px`;
  place.style.top = `${box.bottom + 6}px`;
}

function show(id) {
  find(id)?.scrollIntoView({ behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth', block: 'start' });
}

function observe() {
  const watcher = new IntersectionObserver((entries) => {
    const seenNow = entries.filter(({ isIntersecting }) => isIntersecting);
    if (!seenNow.length) return;
    station = seenNow[0].target.id;
    find('lanes').innerHTML = lanes(view(), station);
  }, { rootMargin: '-35% 0px -60% 0px' });
  document.querySelectorAll('.station').forEach((section) => watcher.observe(section));
}

function tabs() {
  find('tabs').innerHTML = data.models.length > 1 ? data.models.map(({ title }, n) => `<button type="button" data-model="${n}" aria-pressed="${n === state.model}">${escaped(title)}</button>`).join('') : '';
  const { examples, said } = data.models[state.model];
  find('about').textContent = said;
  find('examples').innerHTML = examples.length > 1 ? `try: ${examples.map(({ text }, n) => `<button type="button" data-example="${n}">${escaped(text)}</button>`).join(' ')}` : '';
}

function begin() {
  if (readLink(state, START)) wanted = {};
  find('text').value = state.text;
  const { weights, module } = data.models[state.model];
  find('text').readOnly = !weights && !module;
  tabs();
  find('glossary-list').innerHTML = Object.keys(data.words.glossary).map((term) => `<li>${explained(term)}</li>`).join('');
  find('key').innerHTML = key();
  return read(true);
}

const tour = new Tour(find('tour'), data.words.tour, (id) => saidOf(id).tour, show);
listen(document, find('readout'));
document.addEventListener('click', clicked);
document.addEventListener('change', changed);
document.addEventListener('input', slid);
document.addEventListener('keydown', pressed);
document.addEventListener('pointerover', ({ target }) => { if (target.closest?.('.gl')) gloss(target.closest('.gl')); else if (!target.closest?.('#gloss')) find('gloss').hidden = true; });
document.addEventListener('focusin', ({ target }) => { if (target.closest?.('.gl')) gloss(target); else find('gloss').hidden = true; });
addEventListener('hashchange', () => { if (readLink(state, START)) { find('text').value = state.text; tabs(); read(true); } });
begin();
