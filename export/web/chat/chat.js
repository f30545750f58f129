// A conversation with a decoder; a model without a chat template continues the text.

import { Client } from './client.js';
import { controlled, offerOffline } from './offline.js';
import { deviceFor, fillModels, number, ONE_THREAD, showMethod, threads } from './settings.js';
import { find, made, rounded, showFacts } from './view.js';

const client = new Client();
const messages = []; // [{role, content}]
let [site, about, opened, running] = [null, null, null, null];

async function begin() {
  await controlled();
  about = await client.ask('begin', { base: document.baseURI });
  site = await (await fetch('site.json')).json();
  find('title').textContent = document.title = site.title;
  find('made-of').textContent = `Transformers.js ${site.transformers} on onnxruntime-web ${site.onnxruntime_web}; all files come from this site.`;
  find('device').querySelector('[value="webgpu"]').disabled = !about.webgpu;
  Object.assign(find('one-thread'), { hidden: about.isolated, textContent: ONE_THREAD });
  fillModels(site);
  const { templates, generation } = site.config;
  find('instructions').hidden = !templates;
  if (!templates) find('text').placeholder = 'Type the beginning of a text; Enter lets the model continue it';
  const fields = { temperature: generation.temperature, topK: generation.top_k, topP: generation.top_p, limit: generation.max_new_tokens };
  for (const [id, value] of Object.entries(fields)) if (value) find(id).value = find(id).defaultValue = String(value);
  if (generation.sample) find('method').value = 'sample';
  showMethod();
  await open();
}

/** Open the chosen model; the conversation stays. */
async function open() {
  if (running) running.stop();
  await running?.catch(() => {});
  opened = null;
  enable();
  const model = site.models[Number(find('model').value)];
  const [device, count] = [deviceFor(model, about), threads(about.isolated)];
  say(`Loading ${model.name}`);
  find('progress').hidden = false;
  try {
    const heard = ({ share }) => { find('progress').value = share; };
    opened = { device, ...await client.ask('open', { number: Number(find('model').value), device, threads: count }, heard) };
  } finally {
    find('progress').hidden = true;
    enable();
  }
  say('Ready');
  showSpeed();
  await offerOffline(site.files, attempt);
}

/** What can be pressed: a message is answered by an open model, one at a time. */
function enable() {
  for (const id of ['model', 'device']) find(id).disabled = !opened && !find('error').textContent;
  find('send').disabled = !opened || Boolean(running);
  find('stop').hidden = !running;
  find('new').hidden = !messages.length || Boolean(running);
  find('again').hidden = messages.at(-1)?.role !== 'assistant' || !opened || Boolean(running);
}

async function answer() {
  const told = find('system').value.trim();
  const given = site.config.templates && told ? [{ role: 'system', content: told }, ...messages] : [...messages];
  const box = shown('assistant', '');
  box.classList.add('running');
  const options = {
    sample: find('method').value === 'sample', temperature: number('temperature'), topK: number('topK'), topP: number('topP'),
    limit: number('limit'),
  };
  running = client.ask('answer', { messages: given, options }, ({ text }) => { box.textContent = text; });
  enable();
  try {
    const found = await running;
    messages.push({ role: 'assistant', content: found.text });
    box.textContent = found.text;
    box.dataset.ids = found.ids.join(' ');
    if (found.cut) box.append(made('small', { textContent: 'Cut off at the most tokens that are allowed.' }));
    showSpeed(found);
    find('status').textContent = `The model's answer: ${found.text}`;
  } catch (error) {
    box.remove();
    throw error;
  } finally {
    box.classList.remove('running');
    running = null;
    enable();
  }
}

function shown(role, text) {
  const item = made('li', { className: role, textContent: text, dir: 'auto' });
  find('conversation').append(item);
  return item;
}

async function send() {
  const text = find('text').value;
  if (!text.trim() || running || !opened) return;
  messages.push({ role: 'user', content: text });
  shown('user', text);
  find('text').value = '';
  await answer();
}

async function again() {
  messages.pop();
  find('conversation').lastElementChild.remove();
  await answer();
}

function anew() {
  messages.length = 0;
  find('conversation').replaceChildren();
  enable();
  find('text').focus();
}

function showSpeed(found) {
  const { seconds, threads: count, device } = opened;
  showFacts(find('facts'), {
    speed: found && `${rounded(found.tokensPerSecond)} tokens/s`,
    'first token after': found && `${Math.round(found.firstSeconds * 1000)} ms`,
    'the conversation so far': found && `${found.prompt} tokens`,
    'loaded in': `${seconds.toFixed(1)} s`,
    'runs on': device === 'webgpu' ? 'WebGPU' : `wasm, ${count} thread${count > 1 ? 's' : ''}`,
  });
}

const say = (text) => { find('state').textContent = text; };

/** Show an error in one line, until something succeeds. */
async function attempt(work) {
  Object.assign(find('error'), { hidden: true, textContent: '' });
  try {
    await work;
  } catch (error) {
    Object.assign(find('error'), { hidden: false, textContent: error.message });
    if (!opened) say('No model is open');
    enable();
  }
}

find('say').addEventListener('submit', (event) => {
  event.preventDefault();
  attempt(send());
});
find('text').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  attempt(send());
});
find('stop').addEventListener('click', () => running?.stop());
find('again').addEventListener('click', () => attempt(again()));
find('new').addEventListener('click', anew);
find('method').addEventListener('change', showMethod);
for (const id of ['model', 'device']) find(id).addEventListener('change', () => attempt(open()));
attempt(begin());
