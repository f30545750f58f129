// Building blocks of the views: displayed text, colours, and matrices to point at. All these scripts are in one
// function of the data, which runs again for another text; `signal` removes an earlier run's listeners.

const make = (tag, properties = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "list" && name !== "role") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};
const byId = (id) => document.getElementById(id);

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const weights = (text) => {
  if (!data.maps.bits) return text;
  const raw = bytes(text);
  return data.maps.bits === 16 ? new Uint16Array(raw.buffer) : raw;
};
const FULL = data.maps.bits ? 2 ** data.maps.bits - 1 : 1; // numbers computed by the page aren't packed
const DIGITS = data.maps.bits === 8 ? 2 : 4;

// One kind of attention: a weight by model (0 or 1), layer, head, query row and key column.
const kinds = Object.entries(data.maps.kinds).map(([id, kind]) => {
  const [layers, heads, rows, columns] = kind.shape;
  const values = kind.values.map(weights);
  const parts = kind.difference ? new Int8Array(bytes(kind.difference.values).buffer) : null;
  // of maps in which no row looks ahead, the cells up to the diagonal alone are held
  const cellOf = (held, layer, head, row, column) => {
    const before = layer * heads + head;
    if (held.length === layers * heads * rows * columns) return held[(before * rows + row) * columns + column];
    return column > row ? 0 : held[(before * rows * (rows + 1) + row * (row + 1)) / 2 + column];
  };
  const weight = (model, ...at) => cellOf(values[model], ...at) / FULL;
  const largest = (layer, head) => kind.difference.largest[layer][head];
  const difference = (layer, head, row, column) => (cellOf(parts, layer, head, row, column) / 127) * largest(layer, head);
  // layer or head -1: the mean over all
  const mean = (model, layer, head, row, column) => {
    const chosen = (n, count) => (n < 0 ? [...Array(count).keys()] : [n]);
    let sum = 0;
    for (const l of chosen(layer, layers)) for (const h of chosen(head, heads)) sum += weight(model, l, h, row, column);
    return sum / (chosen(layer, layers).length * chosen(head, heads).length);
  };
  return { id, ...kind, layers, heads, rows, columns, of: [kind.rows, kind.columns], weight, largest, difference, mean };
});
const kindOf = (id) => kinds.find((kind) => kind.id === id);

const textOf = (id) => data.texts[id];
const marked = (text) => text.replace(/^ +/, (spaces) => "·".repeat(spaces.length)).replace(/\n/g, "⏎").replace(/\t/g, "⇥");
const plain = (id) => marked(textOf(id));
// Text as nodes, with leading spaces softly visible.
const shown = (text) => {
  const spaces = text.match(/^·*/)[0];
  return [spaces ? make("span", { className: "space" }, spaces) : null, text.slice(spaces.length) || (spaces ? "" : "∅")];
};
const quoted = (id) => `‹${plain(id)}›`;
// A decoder's row is labelled by the token written from it, with the token read last beside it.
const idsOf = (side) => (side === "target" ? data.written : data.sides[side].ids);
const labels = (side) => data.pieces[side].map(marked);
const quotedAt = (side, at) => `‹${labels(side)[at]}›`;
const readAt = (side, at) => (side === "target" ? `has read ${quotedAt("read", at)}` : "");
const number = (value, digits = 4) =>
  value === 0 ? "0" : Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(digits))) : value.toExponential(1);
const share = (value) => (value >= 0.9995 ? "100%" : value >= 0.001 ? `${(100 * value).toPrecision(3)}%` : value.toExponential(1));

// Colours from the style sheet, in light and in dark.
const palette = {};
const readPalette = () => {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["low", "high", "more", "less", "ink"]) {
    const hex = style.getPropertyValue(`--${name}`).trim();
    palette[name] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }
};
readPalette();
const mixed = (from, to, part) => from.map((value, i) => Math.round(value + (to[i] - value) * part));
const sequential = (value) => mixed(palette.low, palette.high, Math.min(1, Math.max(0, value)) ** 0.75);
const diverging = (value) => mixed(palette.low, value > 0 ? palette.more : palette.less, Math.min(1, Math.abs(value)));

const painted = new Set(); // redrawn when the colours change
const repaint = () => painted.forEach((draw) => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener(
  "change",
  () => {
    readPalette();
    repaint();
  },
  { signal },
);

// One pixel per cell; the style sheet enlarges them.
const paint = (canvas, rows, columns, colour) => {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const [red, green, blue] = colour(Math.floor(i / columns), i % columns);
    image.data.set([red, green, blue, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
};

// A large matrix with labels: {rows, columns: labels, value(r, c), colour(r, c), say(r, c), name}.
const matrix = (place, { rows, columns, value, colour, say, name, cell }) => {
  place.replaceChildren();
  const room = Math.min(1000, innerWidth - 60) - 130;
  const size = cell || Math.max(15, Math.min(34, Math.floor(room / columns.length), Math.floor(620 / rows.length)));
  const canvas = make("canvas", { tabIndex: 0, "aria-label": `${name}: arrow keys move from cell to cell`, role: "img" });
  canvas.style.width = `${size * columns.length}px`;
  canvas.style.height = `${size * rows.length}px`;
  const label = (text, side) => {
    const span = make("span", { title: text }, text);
    span.style[side] = span.style.lineHeight = `${size}px`;
    return span;
  };
  const top = make("div", { className: "columns", "aria-hidden": "true" }, ...columns.map((text) => label(text, "width")));
  const left = make("div", { className: "rows", "aria-hidden": "true" }, ...rows.map((text) => label(text, "height")));
  const cross = make("div", { className: "cross" });
  cross.style.width = cross.style.height = `${size}px`;
  const readout = make("p", { className: "value", "aria-live": "polite" });
  const draw = () => paint(canvas, rows.length, columns.length, colour);
  draw();
  painted.add(draw);
  let at = [0, 0];
  const go = (row, column) => {
    at = [Math.max(0, Math.min(rows.length - 1, row)), Math.max(0, Math.min(columns.length - 1, column))];
    cross.style.display = "block";
    cross.style.left = `${at[1] * size - 1}px`;
    cross.style.top = `${at[0] * size - 1}px`;
    [...left.children].forEach((span, i) => span.classList.toggle("lit", i === at[0]));
    [...top.children].forEach((span, i) => span.classList.toggle("lit", i === at[1]));
    readout.textContent = say(...at);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    go(Math.floor((event.clientY - box.top) / size), Math.floor((event.clientX - box.left) / size));
  });
  canvas.addEventListener("focus", () => go(...at));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    go(at[0] + move[0], at[1] + move[1]);
  });
  const table = make("details", {}, make("summary", {}, "the numbers as a table"));
  table.addEventListener("toggle", () => {
    if (!table.open || table.querySelector("table")) return;
    const head = make("tr", {}, make("td"), ...columns.map((text) => make("th", { scope: "col" }, text)));
    const lines = rows.map((text, r) =>
      make("tr", {}, make("th", { scope: "row" }, text), ...columns.map((_, c) => make("td", {}, value(r, c)))),
    );
    const wide = { className: "wide", tabIndex: 0, role: "region", "aria-label": "the numbers of this head" };
    table.append(make("div", wide, make("table", {}, head, ...lines)));
  });
  place.append(
    make("div", { className: "matrix" }, make("div"), top, left, make("div", { className: "cells" }, canvas, cross)),
    readout,
    table,
  );
  return () => painted.delete(draw);
};

const select = (name, options, chosen, changed) => {
  const list = make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
  list.value = chosen;
  list.addEventListener("change", () => changed(Number(list.value)));
  return make("label", {}, name, list);
};
const radios = (name, options, chosen, changed) => {
  const inputs = options.map(([value, text]) => {
    const input = make("input", { type: "radio", name, value, checked: value === chosen });
    input.addEventListener("change", () => changed(Number(value)));
    return make("label", {}, input, text);
  });
  return make("fieldset", {}, make("legend", { className: "hidden" }, name), ...inputs);
};
const layerOptions = (count, mean) => [
  ...(mean ? [[-1, "mean of all"]] : []),
  ...[...Array(count).keys()].map((i) => [i, String(i + 1)]),
];
const runtimeOptions = (difference) => [
  ...data.runtimes.map((name, i) => [i, name]),
  ...(difference && data.runtimes.length > 1 ? [[2, "difference"]] : []),
];
