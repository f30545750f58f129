// The page: a sentence, the stack, the stations. Choosing, typing and switching redraws all of it.

import { columnOf, derived, escaped, key, listen, short, unfolded } from '../../../mlx_transformer/page/kit.js';
import { cell, cross, heads, looksAt, mixed, qkv, attentionOf } from './attention_stations.js';
import { breaker, breaking, eachInTurn, partName, seen, switchesOf } from './breaking.js';
import { position, row, token } from './first_stations.js';
import { feedForward, next, norm } from './layer_stations.js';
import { Live, MOST_TOKENS } from './models.js';
import { others } from './others.js';
import { logits, search } from './output_stations.js';
import { readLink, writeLink } from './link.js';
import { Missing } from './pass.js';
import { picture } from './picture.js';
import { alike, strangeWords } from './pieces.js';
import { rest } from './resting.js';
import { Tour } from './tour.js';
import { training } from './training_station.js';
import { placed, viewOf } from './view.js';
import { entry, footer, kindsOf, words } from './words.js';

const data = JSON.parse(document.getElementById('walk-data').textContent);
const find = (id) => document.getElementById(id);
const opened = new Map(); // models, opened at first use
export const modelOf = (n) => {
  if (!opened.has(n)) opened.set(n, data.models[n].weights ? new Live(data.models[n]) : new others.Recorded(data.models[n]));
  return opened.get(n);
};
const START = { model: 0, text: '', stack: 'encoder', word: 0, step: 0, layer: 0, head: 0, column: 0, key: null, temperature: 1, topK: 0, beam: 4, alpha: 0.6, width: 16, large: null, off: {} };
const state = { ...START, text: data.models[0].examples[0].text, ...data.models[0].examples[0].at };
let [model, whole, pass, station, tree, breakage, turns] = [null, null, null, 'token', null, '', ''];
let wanted = data.models[0].examples[0].find ?? {}; // words to look at first
let goal = null; // the station that the address names
const REST = 120; // milliseconds without a key, before what is typed is read
let later = 0;
let drawn = 0; // passes so far: late results of earlier ones are dropped
let done = 0; // the last one of which everything stands on the page
let painting = 0; // choices so far: a later one ends the drawing of an earlier one

const stationsOf = ({ architecture }) => [
  token, row, position, qkv, cell, mixed, heads, norm, feedForward, next,
  ...(architecture === 'encoder-decoder' ? [cross] : []), logits, ...(architecture === 'encoder' ? [] : [search]),
  ...(model.live ? [training, breaking] : []),
].map((each) => (!model.live && others.stations[each.id]) || each);
/** A station's text, with the variant for this kind of model. */
const saidOf = (id) => {
  const found = (model.live ? kindsOf(model.config) : others.kinds(model.spec)).map((kind) => data.words[kind]?.[id]).filter(Boolean);
  const more = found.map((said) => said.more ?? '').join('');
  return Object.assign({}, data.words.stations[id], ...found, { more });
};
/** A station's answer, with the model's own sizes in it. */
const answer = ({ id }, { shape, l }) => {
  const { answer: said, more } = saidOf(id);
  const sizes = { heads: shape.heads, dk: shape.dk, root: short(Math.sqrt(shape.dk), 4), kv: shape.kvHeads, group: shape.heads / shape.kvHeads, window: shape.window(l) ?? 'none' };
  return words(Object.entries(sizes).reduce((text, [name, size]) => text.replaceAll(`{${name}}`, size), said + more));
};
const view = () => ({ ...viewOf(model, pass, state), tree, seen: breakage, turns, said: data.words, training: data.training });

function frame() {
  const v = view();
  find('stations').innerHTML = stationsOf(model.config).map((each, n) => [each, n, saidOf(each.id)]).map(([each, n, said]) => (
    `<section id="${each.id}" class="station" aria-labelledby="${each.id}-title"><h2 id="${each.id}-title" tabindex="-1"><span>${n + 1}</span> ${said.title}</h2>`
    + `<div class="answer"><h3>${escaped(said.question)}</h3><p></p></div><p class="formula"></p><div class="body"></div>`
    + `<div class="controls">${each.controls?.(v) ?? ''}</div><p class="ask"><b>Try:</b> ${escaped(said.ask)}</p>`
    + `<details class="numbers"><summary>the numbers as a table</summary></details>`
    + `<p class="links">${footer(said, data.links)}</p></section>`)).join('');
  find('breaker').innerHTML = model.live ? breaker(v) : '';
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

/** Where what has the focus is seen, in pixels below the upper edge; null if it is in no station or out of sight. */
function focusAt() {
  if (!find('stations').contains(document.activeElement)) return null;
  const { top: above } = document.activeElement.getBoundingClientRect();
  return above >= 0 && above < innerHeight ? above : null;
}

function fill(only) {
  const v = view();
  const before = focusAt();
  for (const each of stationsOf(model.config)) {
    if (!only.includes(each.id)) continue;
    const section = find(each.id);
    const focused = section.querySelector('.body').contains(document.activeElement)
      ? [...section.querySelectorAll('.body button, .body summary, .body [tabindex]')].indexOf(document.activeElement) : -1;
    const folds = [...section.querySelectorAll('.body details')].map(({ open }) => open);
    section.querySelector('.formula').innerHTML = each.formula(v);
    section.querySelector('.answer p').innerHTML = answer(each, v);
    section.querySelector('.body').innerHTML = bodyOf(each, v);
    const now = section.querySelectorAll('.body details');
    if (now.length === folds.length) now.forEach((fold, n) => { fold.open = folds[n]; unfolded(fold); });
    section.querySelectorAll('.numbers table, .numbers .wide').forEach((old) => old.remove());
    section.querySelector('.numbers').open = false;
    if (focused >= 0) section.querySelectorAll('.body button, .body summary, .body [tabindex]')[focused]?.focus({ preventScroll: true });
  }
  if (before !== null && find('stations').contains(document.activeElement)) { // what grew above it doesn't move it
    const moved = document.activeElement.getBoundingClientRect().top - before;
    if (moved) scrollBy(0, moved);
  }
  writeLink(state, START);
}

const chip = (text, small, on, kind, n, strange = '') => (
  `<button type="button" class="chip${on ? ' on' : ''}${strange ? ' strange' : ''}" data-${kind}="${n}" aria-pressed="${on}"><span class="tok">${escaped(text)}</span>${small ? `<small>${escaped(small)}</small>` : ''}</button>`);

/** Fill a place anew; what has the focus keeps it. */
function filled(id, html) {
  const place = find(id);
  const at = [...place.querySelectorAll('button')].indexOf(document.activeElement);
  place.innerHTML = html;
  if (at >= 0) place.querySelectorAll('button')[at]?.focus({ preventScroll: true });
}

const narrow = matchMedia('(max-width: 1100px)');
const draw = (v) => filled('lanes', picture(v, station, narrow.matches));

function top(v) {
  const { architecture } = model.config;
  const lines = [];
  const strange = strangeWords(architecture === 'decoder' ? pass.pieces.written.slice(0, pass.given) : pass.pieces.source, model.words ?? new Set());
  if (architecture !== 'decoder') lines.push(['reads', pass.pieces.source.map((text, n) => chip(text, '', v.stack === 'encoder' && n === v.i, 'word', n, strange[n]))]);
  if (architecture !== 'encoder') {
    lines.push(['while writing', pass.pieces.written.map((text, n) => chip(text, `has read ${pass.pieces.target[n]}`, n === v.step && (v.stack === 'decoder' || architecture === 'encoder-decoder'), 'step', n, architecture === 'decoder' ? strange[n] : ''))]);
  }
  filled('chips', lines.map(([name, chips]) => `<div class="line"><span>${name}</span><div class="chips" role="group" aria-label="${name}">${chips.join('')}</div></div>`).join(''));
  draw(v);
  const pick = (name, count, chosen) => `<span class="pick" role="group" aria-label="${name}">${name} ${Array.from({ length: count }, (_, n) => (
    `<button type="button" data-${name}="${n}" aria-pressed="${n === chosen}">${n + 1}</button>`)).join('')}</span>`;
  filled('picks', pick('layer', v.shape.layers, v.l) + pick('head', v.shape.heads, v.h)
    + (architecture === 'encoder-decoder' ? `<span class="pick" role="group" aria-label="stack">${['encoder', 'decoder'].map((stack) => (
      `<button type="button" data-stack="${stack}" aria-pressed="${stack === v.stack}">${stack}</button>`)).join('')}</span>` : ''));
  const part = `${v.shape.layer(v.l)}.self_attention`;
  find('said').innerHTML = pass.has(`${part}.weights`) ? `${looksAt(v, attentionOf(v, 'self_attention'))} (layer ${v.l + 1}, head ${v.h + 1})` : '';
}

/** What the model doesn't know of this text: words, and what is past the last token. */
function unknown() {
  const known = model.words ?? new Set();
  const said = [...new Set(strangeWords(model.live ? model.pieces(model.ids(state.text)) : [], known))].filter(Boolean).slice(0, 3).map((word) => (
    `‹${escaped(word.slice(0, 24))}› stands in none of the sentences it learned from; it knows ${alike(word, known).map((each) => (
      `<button type="button" data-old="${escaped(word)}" data-new="${escaped(each)}">${escaped(each)}</button>`)).join(' ')}`));
  if (model.live && model.ids(state.text).length === MOST_TOKENS) said.push(`${MOST_TOKENS} tokens are read at most, the first`);
  find('strange').innerHTML = said.map((each) => `${each}.`).join(' ');
  find('strange').hidden = !said.length;
}

/** The output and its log p; now: of the model with parts off, {output, logP}, or null. */
function headline(now = null) {
  unknown();
  const { output, logP } = now ?? whole;
  find('output').textContent = output || now ? `→ ${output || '(nothing)'}` : '';
  const guessed = model.live && model.config.architecture === 'encoder' ? model.logP(whole, switchesOf(state.off)) : logP;
  const before = now ? ` (whole: ${derived(whole.logP)})` : '';
  find('scores').innerHTML = model.live ? `log p ${derived(guessed)}${before}` : '';
  const off = [...Object.keys(state.off).filter((name) => name !== 'parts'), ...(state.off.parts ?? []).map(partName)];
  find('broken').hidden = !off.length;
  find('broken').textContent = off.length ? `off: ${off.join(', ')}` : '';
}

/** Read the text with the parts switched off, and draw everything, in slices. `anew`: another text or model. */
async function read(anew) {
  const mine = begun();
  const stopped = () => mine !== drawn;
  find('stations').classList.remove('moved');
  try {
    if (anew) {
      const fresh = model !== modelOf(state.model);
      model = modelOf(state.model);
      const found = await model.read(state.text, {}, stopped);
      if (stopped()) return;
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
    top(view());
    for (const { id } of stationsOf(model.config)) {
      fill([id]);
      await rest();
      if (stopped()) return;
    }
    if (!model.live) return ready();
    if (changed && model.config.architecture !== 'encoder') {
      const now = await model.written(state.text, switches, stopped);
      if (stopped()) return;
      headline(now);
    }
    breakage = await seen(model, whole, state.off, data.words.surer, stopped);
    if (stopped()) return;
    fill(['break']);
    if (model.config.architecture !== 'encoder') await grow(mine);
    if (stopped()) return;
    dispatchEvent(new CustomEvent('walked', { detail: { model, pass, tree, whole: !changed } })); // for following.js
    ready();
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    find('wrong').textContent = error.message;
    ready();
  }
}

const ready = () => {
  done = drawn;
  find('busy').hidden = true;
  document.documentElement.dataset.ready = String(drawn);
  if (goal) show(goal);
  goal = null;
};

/** Nothing earlier is waited for any more. Returns the number of what begins. */
function begun() {
  delete document.documentElement.dataset.ready;
  find('busy').hidden = false;
  painting += 1;
  return ++drawn;
}

async function grow(mine = drawn) {
  const { beam, alpha } = state;
  const stopped = () => mine !== drawn || beam !== state.beam || alpha !== state.alpha;
  const found = await model.tree(state.text, switchesOf(state.off), state, stopped);
  if (stopped()) return;
  tree = found;
  fill(['search']);
}

/** The search alone once more, with another beam or penalty. */
async function regrow() {
  const mine = drawn;
  delete document.documentElement.dataset.ready;
  find('busy').hidden = false;
  await grow();
  if (mine === done) ready();
}

const inSight = ({ id }) => {
  const { top: above, bottom } = find(id).getBoundingClientRect();
  return bottom > 0 && above < innerHeight;
};

/** Show another place of the pass: what is in sight at once, the other stations in slices. */
async function choose(changes) {
  const mine = ++painting;
  find('stations').classList.add('moved'); // its animations run once
  Object.assign(state, changes);
  const all = stationsOf(model.config);
  const first = all.filter(inSight);
  delete document.documentElement.dataset.ready;
  fill(first.map(({ id }) => id));
  top(view());
  for (const { id } of all.filter((each) => !first.includes(each))) {
    await rest();
    if (mine !== painting) return;
    fill([id]);
  }
  if (drawn === done) ready();
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

function clicked(event) {
  const { target, clientX } = event;
  if (target.closest('.skip')) { // the address keeps what one sees
    event.preventDefault();
    return show(stationsOf(model.config)[0].id);
  }
  const row = target.closest('.strip i');
  if (row) return choose({ column: columnOf(row, clientX) });
  const large = target.closest('button[data-large], .map')?.closest('[data-of]');
  if (large) {
    state.large = state.large === Number(large.dataset.of) ? null : Number(large.dataset.of);
    return fill(['heads', 'cross'].filter(find));
  }
  const button = target.closest('button');
  if (!button) return undefined;
  if (button.dataset.flip) {
    const box = document.querySelector(`[data-off=${button.dataset.flip}]`);
    box.checked = !box.checked;
    return changed({ target: box });
  }
  const { go, stack, layer, gl, example, model: other } = button.dataset;
  if (gl) return gloss(button);
  if (example !== undefined) return open(data.models[state.model].examples[Number(example)]);
  if (other !== undefined) { state.model = Number(other); Object.assign(state, { off: {} }); tabs(); return open(data.models[state.model].examples[0]); }
  if (button.id === 'all-on') { find('part').value = ''; document.querySelectorAll('[data-off]').forEach((box) => { box.checked = false; }); state.off = {}; return read(false); }
  if (button.id === 'try-all') { turns = eachInTurn(model, whole); return fill(['break']); }
  if (button.dataset.old) {
    find('text').value = state.text.split(/(\s+)/).map((word) => (word === button.dataset.old ? button.dataset.new : word)).join('');
    find('text').focus({ preventScroll: true }); // this button goes
    return typed(find('text').value);
  }
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
  if (target.id === 'top-k') { state.topK = Number(target.value); return fill(['logits']); }
  if (target.id === 'beam-size') { state.beam = Number(target.value); return regrow(); }
  return undefined;
}

/** Read what is typed after a rest of the fingers. */
function typed(text) {
  state.text = text;
  clearTimeout(later);
  begun();
  if (text.trim()) later = setTimeout(() => read(true), REST);
  else {
    find('wrong').textContent = data.words.empty;
    ready();
  }
}

function slid({ target }) {
  if (target.id === 'text') return typed(target.value);
  if (target.id === 'width') {
    state.width = 2 ** Number(target.value);
    target.nextElementSibling.textContent = state.width;
    return fill(['cell']);
  }
  if (target.id !== 'temperature' && target.id !== 'alpha') return undefined;
  state[target.id] = Number(target.value);
  target.nextElementSibling.textContent = target.value;
  return target.id === 'alpha' ? regrow() : fill(['logits']);
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

function bring(id) {
  find(id)?.scrollIntoView({ behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth', block: 'start' });
}

/** Scroll to a station, from whose title the keyboard goes on. */
function show(id) {
  bring(id);
  find(`${id}-title`)?.focus({ preventScroll: true });
}

/** Say how high is what stays above, so that nothing with the focus hides under it. */
function cover() {
  const heights = ['sticky', 'now'].map(find).filter((each) => getComputedStyle(each).position === 'sticky').map((each) => each.offsetHeight);
  document.documentElement.style.setProperty('--above', `${Math.max(0, ...heights)}px`);
}

function observe() {
  const watcher = new IntersectionObserver((entries) => {
    const seenNow = entries.filter(({ isIntersecting }) => isIntersecting);
    if (!seenNow.length) return;
    station = seenNow[0].target.id;
    draw(view());
  }, { rootMargin: '-35% 0px -60% 0px' });
  document.querySelectorAll('.station').forEach((section) => watcher.observe(section));
}

function tabs() {
  filled('tabs', data.models.length > 1 ? data.models.map(({ title }, n) => `<button type="button" data-model="${n}" aria-pressed="${n === state.model}">${escaped(title)}</button>`).join('') : '');
  const { examples, said } = data.models[state.model];
  find('about').textContent = said;
  find('examples').innerHTML = examples.length > 1 ? `try: ${examples.map(({ text }, n) => `<button type="button" data-example="${n}">${escaped(text)}</button>`).join(' ')}` : '';
}

/** Apply the address. Without a text it is that of the first example, seen where the example is told best. */
function followed() {
  const named = new URLSearchParams(location.hash.slice(1));
  const { examples: [example] } = data.models[Number(named.get('model'))] ?? data.models[0];
  const bare = !named.has('text');
  if (!readLink(state, bare ? { ...START, ...example.at } : START)) return false;
  if (!(state.model in data.models)) state.model = 0;
  if (bare) state.text = example.text;
  wanted = bare && !named.has('word') && !named.has('step') ? example.find ?? {} : {};
  goal = named.get('at');
  return true;
}

function begin() {
  followed();
  find('text').value = state.text;
  const { weights, module } = data.models[state.model];
  find('text').readOnly = !weights && !module;
  tabs();
  find('glossary-list').innerHTML = Object.keys(data.words.glossary).map((term) => `<li>${explained(term)}</li>`).join('');
  find('key').innerHTML = key();
  return read(true);
}

const tour = new Tour(find('tour'), data.words.tour, (id) => saidOf(id).tour, bring);
const above = new ResizeObserver(cover);
for (const id of ['sticky', 'now']) above.observe(find(id));
narrow.addEventListener('change', () => { if (pass) draw(view()); });
listen(document, find('readout'));
document.addEventListener('click', clicked);
document.addEventListener('change', changed);
document.addEventListener('input', slid);
document.addEventListener('keydown', pressed);
document.addEventListener('pointerover', ({ target }) => { if (target.closest?.('.gl')) gloss(target.closest('.gl')); else if (!target.closest?.('#gloss')) find('gloss').hidden = true; });
document.addEventListener('focusin', ({ target }) => {
  if (target.closest?.('.gl')) gloss(target);
  else find('gloss').hidden = true;
  if (target.closest?.('#breaker') && target.matches(':focus-visible')) target.scrollIntoView({ block: 'nearest', inline: 'nearest' }); // browsers leave half of it out of sight
});
addEventListener('hashchange', () => { if (followed()) { find('text').value = state.text; tabs(); read(true); } });
begin();
