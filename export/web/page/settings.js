// The settings chosen on the page.

import { find, made, megabytes } from './view.js';

export const ONE_THREAD = 'One thread: this page is not cross-origin isolated (its server sends no COOP and COEP headers).';
export const LANGUAGES = ['sourceLanguage', 'targetLanguage']; // form fields of a multilingual model

export function fillModels(site) {
  find('model').replaceChildren(...site.models.map((model, i) => (
    made('option', { value: String(i), textContent: `${model.name}, ${megabytes(model.bytes)} MB` })
  )));
}

/** Fill in the model's languages, its shortlist, and its default generation settings. */
export function fillGeneration({ config, shortlist }) {
  const { languages = {}, beam, length_penalty: alpha, source_language: from = '', target_language: to = '' } = config.generation;
  find('shortlist').hidden = !shortlist;
  const codes = Object.keys(languages).sort();
  find('languages').hidden = !codes.length;
  for (const id of LANGUAGES) {
    find(id).replaceChildren(...['', ...codes].map((code) => made('option', { value: code, textContent: code || 'unsaid' })));
  }
  [from, to].forEach((code, i) => { find(LANGUAGES[i]).value = code; });
  find('lengthPenalty').value = find('lengthPenalty').defaultValue = String(alpha);
  if (beam === 1) return;
  find('beam').value = find('beam').defaultValue = String(Math.min(beam, Number(find('beam').max)));
  find('method').value = 'beam';
}

export const languages = () => ({ source: find(LANGUAGES[0]).value, target: find(LANGUAGES[1]).value });

export function showMethod() {
  for (const each of document.querySelectorAll('.of')) each.hidden = each.dataset.of !== find('method').value;
}

/** A field's number, within its bounds; its default if empty. */
export function number(id) {
  const field = find(id);
  const value = field.value === '' || Number.isNaN(field.valueAsNumber) ? Number(field.defaultValue) : field.valueAsNumber;
  const within = Math.min(Number(field.max), Math.max(Number(field.min), value));
  return field.step === '1' ? Math.round(within) : within;
}

export function options() {
  const [method, beam, lengthPenalty] = [find('method').value, number('beam'), number('lengthPenalty')];
  const [temperature, topK, topP] = ['temperature', 'topK', 'topP'].map(number);
  const more = { languages: languages(), listed: find('listed').checked };
  return { method, beam, lengthPenalty, temperature, topK, topP, seed: BigInt(number('seed')), ...more };
}

/** The device for a model: WebGPU if it can run the model, unless wasm is chosen. about: the browser's abilities. */
export function deviceFor(model, about) {
  const able = about.webgpu && model.webgpu && (about.float16 || !model.float16);
  return able && find('device').value !== 'wasm' ? 'webgpu' : 'wasm';
}

export const threads = (isolated) => (isolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1);
