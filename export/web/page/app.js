// The page: translates the typed text after a short pause in typing.

import { Client } from './client.js';
import { controlled, offerOffline } from './offline.js';
import { deviceFor, fillGeneration, fillModels, LANGUAGES, languages, ONE_THREAD, options, showMethod, threads } from './settings.js';
import { find, megabytes, rounded, showChoices, showFacts, showRows, showShares, showWords } from './view.js';

const PAUSE = 250; // milliseconds without a key press
const CHOICES = 8;
const MOST_WORDS = 60; // longest text with its attention shown
const READ = 'Of 100 parts of the attention, one layer’s heads together, so many went to each word of the text while the word on the left was written.';

const client = new Client();
let [site, about, opened] = [null, null, null];
let [prefix, ids, running, timer] = [[], [], null, 0];

async function begin() {
  await controlled();
  about = await client.ask('begin', { base: document.baseURI });
  site = await (await fetch('site.json')).json();
  find('title').textContent = document.title = site.title;
  showInside(site.inside);
  find('made-of').textContent = `onnxruntime-web ${site.onnxruntime_web}; all files come from this site.`;
  find('device').querySelector('[value="webgpu"]').disabled = !about.webgpu;
  Object.assign(find('one-thread'), { hidden: about.isolated, textContent: ONE_THREAD });
  fillModels(site);
  fillGeneration(site);
  showMethod();
  await open(0);
  await offerOffline(site.files, attempt);
}

/** The link to inside.html, with the typed text. */
function showInside(inside) {
  find('inside').hidden = !inside;
  const link = find('inside').querySelector('a');
  link.addEventListener('click', () => { if (source()) link.hash = new URLSearchParams({ text: source() }); });
}

/** While a model loads, nothing is translated, and the previous model's translation is removed. */
function close() {
  stop();
  [opened, ids] = [null, []];
  enable(false);
  const box = find('translation');
  box.classList.remove('running');
  box.replaceChildren();
  for (const name of ['ids', 'source']) delete box.dataset[name];
  for (const id of ['others', 'attention', 'forced']) find(id).hidden = true;
}

/** Open model number `number`, and translate the typed text again. */
async function open(number) {
  close();
  const model = site.models[number];
  say(`Loading ${model.name}`);
  find('progress').hidden = false;
  const heard = ({ share }) => { find('progress').value = share; };
  try {
    opened = { ...await opening(number, heard), model };
    say('Ready');
    showSpeed();
  } finally {
    find('progress').hidden = true;
    enable(true);
  }
  await translate();
}

/** Load a model on the best device; if WebGPU fails, on wasm. */
async function opening(number, heard) {
  const device = deviceFor(site.models[number], about);
  const request = { model: number, threads: threads(about.isolated) };
  try {
    return { ...await client.ask('open', { ...request, device }, heard), device };
  } catch (error) {
    if (device === 'wasm') throw error;
    return { ...await client.ask('open', { ...request, device: 'wasm' }, heard), device: 'wasm' };
  }
}

function enable(on) {
  for (const id of ['model', 'device']) find(id).disabled = !on;
  find('compare').disabled = !on || !opened;
}

const source = () => find('text').value.replace(/\s*[\r\n]+\s*/g, ' ').trim();

function stop() {
  clearTimeout(timer);
  running?.stop();
  running = null;
}

/** Translate the text in the field; the output starts with the tokens of `prefix`. */
async function translate() {
  stop();
  closeAlternatives();
  const text = source();
  if (!opened) return;
  find('attention').hidden = true;
  if (!text) {
    show({ ids: [], words: [], others: [] });
    return;
  }
  find('translation').classList.add('running');
  delete find('translation').dataset.source;
  const mine = client.ask('translate', { text, options: { ...options(), prefix } }, (part) => running === mine && show(part));
  running = mine;
  const answer = await mine;
  if (running !== mine || !answer) return;
  running = null;
  find('translation').classList.remove('running');
  show(answer);
  find('translation').dataset.source = text;
  showSpeed(answer);
  announce(`Translation: ${answer.words.map((word) => word.text).join('')}`);
  await showAttention();
}

/** Show each output word's attention to the source, if the model returns it. */
async function showAttention() {
  const [text, mine] = [find('translation').dataset.source, ids];
  find('attention').hidden = !opened?.model.attention || !text || !mine.length;
  if (find('attention').hidden || !find('attention-shown').open) return;
  delete find('shares').dataset.ids;
  const { source: from, output, shares } = await client.ask('attention', { text, languages: languages(), ids: mine });
  if (mine !== ids) return; // a newer translation has begun
  const tooMany = Math.max(from.length, output.length) > MOST_WORDS;
  find('attention-told').textContent = tooMany ? `Shown for texts of up to ${MOST_WORDS} words.` : READ;
  const none = { columns: [], rows: [], shares: [] };
  showShares(find('shares'), tooMany ? none : { columns: [...from, '(end)'], rows: output, shares });
  find('shares').dataset.ids = mine.join(' ');
}

function show({ ids: found, words, others }) {
  ids = found;
  const box = find('translation');
  box.dataset.ids = ids.join(' ');
  showWords(box, words, prefix.length, opened.model.kind === 'steps' ? openAlternatives : null);
  find('forced').hidden = prefix.length === 0;
  if (!others) return;
  find('others').hidden = others.length === 0;
  showRows(find('other-rows'), others.map(({ score, text }) => [score.toFixed(3), text]));
}

function showSpeed(answer) {
  const { seconds, threads: count, device, memory } = opened;
  showFacts(find('facts'), {
    speed: answer && `${rounded(answer.tokensPerSecond)} tokens/s`,
    'first word after': answer && `${Math.round(1000 * answer.firstSeconds)} ms`,
    'loaded in': `${seconds.toFixed(1)} s`,
    memory: `${megabytes(answer?.memory ?? memory)} MB (wasm)`,
    'runs on': device === 'webgpu' ? 'WebGPU' : `wasm, ${count} thread${count > 1 ? 's' : ''}`,
  });
}

async function openAlternatives(word, button) {
  const given = ids.slice(0, word.at);
  closeAlternatives();
  button.setAttribute('aria-expanded', 'true');
  const found = await client.ask('alternatives', { text: source(), ...options(), prefix: given, count: CHOICES });
  find('alternatives-head').textContent = `In place of “${button.textContent}”`;
  showChoices(find('choices'), found, ({ id }) => {
    prefix = [...given, id];
    attempt(translate());
  });
  find('alternatives').hidden = false;
  announce(`${found.length} alternatives for ${button.textContent}, below the translation`);
}

function closeAlternatives() {
  find('alternatives').hidden = true;
  for (const button of document.querySelectorAll('.translation [aria-expanded="true"]')) button.setAttribute('aria-expanded', 'false');
}

/** Translate the text with every model, one after another. */
async function compare() {
  const [text, chosen, rows] = [source() || find('text').placeholder, find('model').value, []];
  close();
  find('compared').hidden = false;
  try {
    for (const [number, model] of site.models.entries()) {
      say(`Loading ${model.name}`);
      const begun = await opening(number);
      const answer = await client.ask('translate', { text, options: { ...options(), prefix: [] } });
      const translation = answer.words.map((word) => word.text).join('');
      const numbers = [megabytes(model.bytes), begun.seconds.toFixed(1), rounded(answer.tokensPerSecond)];
      const differs = rows.length > 0 && translation !== rows[0].at(-1).text;
      rows.push([model.name, ...numbers.map((each) => ({ text: each, className: 'n' })), { text: translation, className: differs ? 'differs' : '' }]);
      showRows(find('compare-rows'), rows);
    }
    announce(`${rows.length} models compared`);
  } finally {
    await open(Number(chosen));
  }
  await offerOffline(site.files, attempt);
}

const say = (text) => { find('state').textContent = text; };
const announce = (text) => { find('status').textContent = text; };

/** Show an error in one line, until something succeeds. */
async function attempt(work) {
  find('error').hidden = true;
  try {
    await work;
  } catch (error) {
    find('translation').classList.remove('running');
    Object.assign(find('error'), { hidden: false, textContent: error.message });
    if (!opened) say('No model is open');
  }
}

function again() {
  prefix = [];
  attempt(translate());
}

find('text').addEventListener('input', () => {
  clearTimeout(timer);
  timer = setTimeout(again, PAUSE);
});
for (const field of document.querySelectorAll('.of input')) field.addEventListener('change', again);
for (const id of [...LANGUAGES, 'listed']) find(id).addEventListener('change', again);
find('method').addEventListener('change', () => {
  showMethod();
  again();
});
for (const id of ['model', 'device']) {
  find(id).addEventListener('change', () => {
    prefix = [];
    attempt(open(Number(find('model').value)));
  });
}
find('free').addEventListener('click', again);
find('attention-shown').addEventListener('toggle', () => running ?? attempt(showAttention()));
find('compare').addEventListener('click', () => attempt(compare()));
document.addEventListener('keydown', ({ key }) => key === 'Escape' && closeAlternatives());
showMethod();
attempt(begin());
