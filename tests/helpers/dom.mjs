// A small DOM: as much of a browser as the scripts of our pages ask for, so that Node runs a page and presses its
// controls. It lays nothing out and draws nothing.

const VOID = new Set(['area', 'br', 'hr', 'img', 'input', 'link', 'meta', 'source', 'wbr']);
const RAW = new Set(['script', 'style']);
const ENTITIES = { amp: '&', lt: '<', gt: '>', quot: '"', nbsp: '\u00a0' };
const decoded = (text) => text.replace(/&(#?\w+);/g, (whole, name) => (name[0] === '#' ? String.fromCodePoint(Number(name.slice(1).replace(/^x/i, '0x'))) : ENTITIES[name] ?? whole));
const encoded = (text) => text.replace(/[&<>]/g, (letter) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' })[letter]);
const camel = (name) => name.replace(/-([a-z])/g, (_, letter) => letter.toUpperCase());
const kebab = (name) => name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);

class Target {
  #heard = [];

  addEventListener(type, heard, options) {
    options?.signal?.addEventListener('abort', () => this.removeEventListener(type, heard));
    this.#heard.push([type, heard, options === true]);
  }

  removeEventListener(type, heard) {
    this.#heard = this.#heard.filter(([of, each]) => of !== type || each !== heard);
  }

  /** Events bubble to the document and the window; listeners that capture hear those that don't. */
  dispatchEvent(event) {
    if (!event.target) Object.defineProperty(event, 'target', { value: this, configurable: true });
    const path = [];
    for (let node = this; node; node = node.parentNode ?? node.beyond) path.push(node);
    for (const each of path) each.hear(event, each === this || event.bubbles);
    return !event.defaultPrevented;
  }

  hear(event, own) {
    for (const [type, heard, captures] of [...this.#heard]) if (type === event.type && (own || captures)) heard.call(this, event);
  }
}

class Node extends Target {
  constructor(document) {
    super();
    Object.assign(this, { ownerDocument: document, parentNode: null, childNodes: [] });
  }

  get parentElement() { return this.parentNode instanceof Element ? this.parentNode : null; }
  get children() { return this.childNodes.filter((each) => each instanceof Element); }
  get firstElementChild() { return this.children[0] ?? null; }
  get isConnected() { return this === this.ownerDocument || (this.parentNode?.isConnected ?? false); }
  get textContent() { return this.childNodes.map((each) => each.textContent).join(''); }
  set textContent(text) { this.replaceChildren(...(text === '' ? [] : [String(text)])); }
  contains(other) { for (let node = other; node; node = node.parentNode) if (node === this) return true; return false; }

  append(...nodes) {
    for (const each of nodes.flatMap((node) => (node instanceof Fragment ? [...node.childNodes] : [node]))) {
      const node = typeof each === 'string' ? new Text(this.ownerDocument, each) : each;
      node.remove();
      node.parentNode = this;
      this.childNodes.push(node);
    }
  }

  replaceChildren(...nodes) {
    for (const each of this.childNodes) each.parentNode = null;
    this.childNodes = [];
    this.append(...nodes);
  }

  remove() {
    if (this.parentNode) this.parentNode.childNodes = this.parentNode.childNodes.filter((each) => each !== this);
    this.parentNode = null;
  }

  replaceWith(...nodes) {
    const { parentNode: parent } = this;
    const after = parent.childNodes.slice(parent.childNodes.indexOf(this) + 1);
    this.remove();
    parent.append(...nodes, ...after);
  }

  querySelectorAll(selector) {
    const found = [];
    const walk = (node) => node.children.forEach((each) => { if (matches(each, selector, this)) found.push(each); walk(each); });
    walk(this);
    return found;
  }

  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
}

class Text extends Node {
  constructor(document, text) { super(document); this.data = text; }
  get textContent() { return this.data; }
  get html() { return RAW.has(this.parentNode?.localName) ? this.data : encoded(this.data); }
}

class Fragment extends Node {}

const reflected = ['id', 'href', 'title', 'type', 'name'];
const switches = ['hidden', 'disabled', 'open', 'multiple'];

class Element extends Node {
  constructor(document, name, attributes = {}) {
    super(document);
    this.localName = name;
    this.attributes = attributes;
    if (name === 'template') this.content = new Fragment(document);
    this.dataset = new Proxy({}, {
      get: (_, key) => (typeof key === 'string' ? this.attributes[`data-${kebab(key)}`] : undefined),
      set: (_, key, value) => { this.attributes[`data-${kebab(key)}`] = String(value); return true; },
      has: (_, key) => `data-${kebab(key)}` in this.attributes,
      deleteProperty: (_, key) => delete this.attributes[`data-${kebab(key)}`],
      ownKeys: () => Object.keys(this.attributes).filter((each) => each.startsWith('data-')).map((each) => camel(each.slice(5))),
      getOwnPropertyDescriptor: () => ({ enumerable: true, configurable: true }),
    });
    this.style = { setProperty: (key, value) => { this.style[key] = value; }, getPropertyValue: (key) => this.style[key] ?? '' };
    const change = (found) => { this.attributes.class = found.filter(Boolean).join(' '); };
    const classes = () => (this.attributes.class ?? '').split(/\s+/);
    this.classList = {
      contains: (one) => classes().includes(one),
      add: (one) => change([...classes().filter((each) => each !== one), one]),
      remove: (one) => change(classes().filter((each) => each !== one)),
      toggle: (one, on = !classes().includes(one)) => { this.classList[on ? 'add' : 'remove'](one); return on; },
    };
  }

  get tagName() { return this.localName.toUpperCase(); }
  getAttribute(name) { return this.attributes[name] ?? null; }
  hasAttribute(name) { return name in this.attributes; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  removeAttribute(name) { delete this.attributes[name]; }
  toggleAttribute(name, on = !this.hasAttribute(name)) { if (on) this.attributes[name] = ''; else delete this.attributes[name]; }
  get className() { return this.attributes.class ?? ''; }
  set className(text) { this.attributes.class = text; }
  get readOnly() { return 'readonly' in this.attributes; }
  set readOnly(on) { this.toggleAttribute('readonly', on); }

  get checked() { return this.now ?? 'checked' in this.attributes; }
  set checked(on) { this.now = on; }
  get value() {
    if (this.localName === 'option') return this.attributes.value ?? this.textContent;
    if (this.localName !== 'select') return this.now ?? this.attributes.value ?? '';
    const options = this.querySelectorAll('option');
    return this.now ?? (options.find((each) => 'selected' in each.attributes) ?? options[0])?.value ?? '';
  }
  set value(text) { this.now = String(text); }

  get innerHTML() { return (this.content ?? this).childNodes.map((each) => each.html).join(''); }
  set innerHTML(html) { (this.content ?? this).replaceChildren(...parsed(this.ownerDocument, String(html)).childNodes); }
  get html() {
    const attributes = Object.entries(this.attributes).map(([name, value]) => ` ${name}="${encoded(value).replaceAll('"', '&quot;')}"`).join('');
    return `<${this.localName}${attributes}>${VOID.has(this.localName) ? '' : `${this.innerHTML}</${this.localName}>`}`;
  }
  get outerHTML() { return this.html; }

  insertAdjacentHTML(place, html) {
    const { childNodes } = parsed(this.ownerDocument, html);
    if (place === 'beforeend') this.append(...childNodes);
    else if (place === 'afterbegin') this.replaceChildren(...childNodes, ...this.childNodes);
    else this.replaceWith(...(place === 'beforebegin' ? [...childNodes, this] : [this, ...childNodes]));
  }

  matches(selector) { return matches(this, selector, this); }
  closest(selector) { for (let each = this; each; each = each.parentElement) if (each.matches(selector)) return each; return null; }
  get nextElementSibling() { const all = this.parentNode.children; return all[all.indexOf(this) + 1] ?? null; }
  get previousElementSibling() { const all = this.parentNode.children; return all[all.indexOf(this) - 1] ?? null; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 640, height: 20, right: 640, bottom: 20 }; }
  scrollIntoView() { this.ownerDocument.shown = this.id; }
  focus() { this.ownerDocument.activeElement = this; }
  blur() { this.ownerDocument.activeElement = this.ownerDocument.body; }
  showModal() { this.open = true; }
  close() { this.open = false; }
  animate() { return { finished: Promise.resolve(), cancel() {} }; }
}
for (const name of reflected) Object.defineProperty(Element.prototype, name, { get() { return this.attributes[name] ?? ''; }, set(value) { this.attributes[name] = String(value); } });
for (const name of switches) Object.defineProperty(Element.prototype, name, { get() { return name in this.attributes; }, set(on) { this.toggleAttribute(name, Boolean(on)); } });

const TAG = /<!--[\s\S]*?-->|<!doctype[^>]*>|<(\/?)([a-zA-Z][\w-]*)((?:\s+[^\s=>/"']+(?:\s*=\s*(?:"[^"]*"|'[^']*'|[^\s>]+))?)*)\s*(\/?)>/g;
const ATTRIBUTE = /([^\s=>/"']+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+)))?/g;

/** The nodes of an HTML text. Every element must be closed by name, but void ones. */
export function parsed(document, html) {
  const root = new Fragment(document);
  const open = [root];
  const into = () => open.at(-1).content ?? open.at(-1);
  let at = 0;
  const say = (end) => { if (end > at) into().append(new Text(document, decoded(html.slice(at, end)))); };
  TAG.lastIndex = 0;
  for (let match = TAG.exec(html); match; match = TAG.exec(html)) {
    const [whole, closes, tag, attributes, alone] = match;
    say(match.index);
    at = TAG.lastIndex;
    if (!tag) continue;
    const name = tag.toLowerCase();
    if (closes) {
      const last = open.findLastIndex((each) => each.localName === name);
      if (last < 0) throw new Error(`${whole} closes nothing`);
      open.length = last;
      continue;
    }
    const found = Object.fromEntries([...attributes.matchAll(ATTRIBUTE)].map(([, key, ...values]) => [key, decoded(values.find((each) => each !== undefined) ?? '')]));
    const element = new Element(document, name, found);
    into().append(element);
    if (RAW.has(name)) {
      const end = html.indexOf(`</${name}`, at);
      element.append(new Text(document, html.slice(at, end)));
      at = TAG.lastIndex = html.indexOf('>', end) + 1;
    } else if (!VOID.has(name) && !alone) open.push(element);
  }
  say(html.length);
  return root;
}

const PART = /([\w*-]+)|#([\w-]+)|\.([\w-]+)|\[([\w-]+)(?:([~^$*]?)=(?:"([^"]*)"|'([^']*)'|([^\]]*)))?\]|:(scope|checked)/y;
const TESTS = { '': (a, b) => a === b, '^': (a, b) => a.startsWith(b), $: (a, b) => a.endsWith(b), '*': (a, b) => a.includes(b), '~': (a, b) => a.split(/\s+/).includes(b) };

function simple(element, text, scope) {
  PART.lastIndex = 0;
  while (PART.lastIndex < text.length) {
    const match = PART.exec(text);
    if (!match) throw new Error(`selector ${text}`);
    const [, tag, id, name, attribute, test, ...rest] = match;
    const state = rest.pop();
    const value = rest.find((each) => each !== undefined);
    const holds = tag ? tag === '*' || element.localName === tag.toLowerCase() : id ? element.id === id : name ? element.classList.contains(name)
      : state ? (state === 'scope' ? element === scope : element.checked) : element.hasAttribute(attribute) && (value === undefined || TESTS[test](element.getAttribute(attribute), value));
    if (!holds) return false;
  }
  return true;
}

function matches(element, selector, scope) {
  return selector.split(',').some((each) => {
    const parts = each.trim().replace(/\s*>\s*/g, ' > ').split(/\s+/);
    const fits = (node, at) => {
      if (!(node instanceof Element) || !simple(node, parts[at], scope)) return false;
      if (at === 0) return true;
      if (parts[at - 1] === '>') return fits(node.parentNode, at - 2);
      for (let up = node.parentNode; up; up = up.parentNode) if (fits(up, at - 1)) return true;
      return false;
    };
    return fits(element, parts.length - 1);
  });
}

class Document extends Node {
  constructor(html, window) {
    super(null);
    this.ownerDocument = this;
    this.beyond = window;
    this.append(...parsed(this, html).childNodes);
    this.documentElement = this.querySelector('html');
    this.body = this.querySelector('body');
    this.activeElement = this.body;
  }

  getElementById(id) {
    const search = (node) => { for (const each of node.children) { if (each.id === id) return each; const found = search(each); if (found) return found; } return null; };
    return search(this);
  }
  createElement(name) { return new Element(this, name); }
}

/** A window with this page in it, its scripts not yet run. hash: of the address. reduced: no motion is wanted. */
export function opened(html, { hash = '', reduced = false } = {}) {
  const window = new Target();
  window.parentNode = null;
  const document = new Document(html, window);
  const location = { hash, get href() { return `file:///page.html${this.hash}`; } };
  Object.assign(window, {
    document, location, innerWidth: 1280, innerHeight: 900, copied: [],
    history: { replaceState: (_, __, address) => { location.hash = address; } },
    matchMedia: (query) => ({ matches: reduced && query.includes('reduced-motion'), addEventListener() {} }),
    IntersectionObserver: class { observe() {} disconnect() {} },
    ResizeObserver: class { observe() {} disconnect() {} },
    navigator: { clipboard: { writeText: async (text) => { window.copied.push(text); } } },
    Event: class extends Event {}, CustomEvent,
  });
  return window;
}

/** Run the page's scripts. */
export function run(window) {
  const names = ['document', 'location', 'history', 'matchMedia', 'IntersectionObserver', 'ResizeObserver', 'navigator', 'innerWidth', 'innerHeight'];
  const own = { addEventListener: window.addEventListener.bind(window), dispatchEvent: window.dispatchEvent.bind(window) };
  for (const script of window.document.querySelectorAll('script')) {
    if (script.type) continue;
    new Function(...names, ...Object.keys(own), script.textContent)(...names.map((name) => window[name]), ...Object.values(own));
  }
}

/** An event at an element, as a person causes it. */
export function press(element, type, given = {}) {
  const event = new Event(type, { bubbles: true, cancelable: true });
  for (const [key, value] of Object.entries({ clientX: 0, key: '', shiftKey: false, ctrlKey: false, metaKey: false, altKey: false, ...given })) Object.defineProperty(event, key, { value });
  element.dispatchEvent(event);
  return event;
}
