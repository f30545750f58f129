// Predictions, the tree of a beam search, each layer's classifier, and norms.
const chosen = (card, draw) => {
  if (data.runtimes.length > 1) {
    card.append(make("div", { className: "controls" }, radios(`${card.id} of`, runtimeOptions(false), 0, draw)));
  }
};

const steps = () => {
  byId("steps-section").hidden = !data.steps.of.length;
  if (!data.steps.of.length) return;
  const card = byId("steps");
  const row = make("div", { className: "steps", role: "list", tabIndex: 0, "aria-label": "predictions, position by position" });
  const encoder = data.architecture === "encoder";
  const draw = (model) => {
    row.replaceChildren(
      ...data.steps.of[model].map((step, i) => {
        const written = data.written[i];
        const known = step.ids.indexOf(written);
        const bars = step.ids.map((id, k) => [id, step.p[k], k === known]);
        if (known < 0) bars.push([written, step.written, true]);
        return make(
          "div",
          { className: `step${step.given && !encoder ? " given" : ""}`, role: "listitem" },
          make("header", {}, encoder ? `${i}: in place of ${quotedAt("source", i)}` : `${i}: ${readAt("target", i)}`),
          ...bars.map(([id, p, is]) => {
            const bar = make("i");
            bar.style.width = `${100 * p}%`;
            const name = is && known < 0 ? `#${step.rank} ` : "";
            return make(
              "div",
              { className: `bar${is ? " written" : ""}`, title: `${plain(id)} (id ${id}): ${p}` },
              bar,
              make("span", {}, name, ...shown(plain(id))),
              make("b", {}, share(p)),
            );
          }),
        );
      }),
    );
  };
  chosen(card, draw);
  card.append(row);
  draw(0);
};

const SVG = "http://www.w3.org/2000/svg";
const drawn = (tag, attributes, text) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const FATES = { k: "kept", f: "finished", d: "dropped" };

const beam = () => {
  byId("beam-section").hidden = !data.beam;
  if (!data.beam) return;
  const { step, parent, token, log_p: logP, fate, score } = data.beam;
  const [column, line, width] = [112, 40, 96];
  const finished = [...step.keys()].filter((i) => fate[i] === "f");
  const winner = finished.reduce((a, b) => (a === null || score[b] > score[a] ? b : a), null);
  const best = new Set();
  for (let i = winner; i !== null && i >= 0; i = parent[i]) best.add(i);
  const row = [];
  const counts = [];
  step.forEach((t) => row.push((counts[t] = (counts[t] ?? -1) + 1)));
  const height = (Math.max(...counts) + 1) * line + 8;
  const svg = drawn("svg", { class: "tree", width: (Math.max(...step) + 2) * column, height, role: "img", "aria-label": "the tree of the beam search" });
  const x = (i) => (i < 0 ? 4 : (step[i] + 1) * column - column + 74);
  const y = (i) => (i < 0 ? 4 : row[i] * line + 4);
  svg.append(drawn("text", { x: 8, y: 24 }, "start"));
  const order = [...step.keys()].sort((a, b) => best.has(a) - best.has(b));
  for (const i of order) {
    const [x1, y1] = parent[i] < 0 ? [44, 20] : [x(parent[i]) + width, y(parent[i]) + 16];
    const [x2, y2] = [x(i), y(i) + 16];
    if (fate[i] === "d" && !best.has(i)) continue;
    const bend = (x2 - x1) / 2;
    svg.append(drawn("path", { d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, class: best.has(i) ? "best" : "" }));
  }
  const describe = (i) => {
    const end = score[i] === null ? "" : `, score ${score[i]}`;
    return `step ${step[i] + 1}: ${plain(token[i])}, log p ${logP[i]}${end}, ${FATES[fate[i]]}`;
  };
  for (const i of step.keys()) {
    const group = drawn("g", { class: `${FATES[fate[i]]}${best.has(i) ? " best" : ""}` });
    const text = plain(token[i]);
    group.append(
      drawn("title", {}, describe(i)),
      drawn("rect", { x: x(i), y: y(i), width, height: 34, rx: 7 }),
      drawn("text", { x: x(i) + 7, y: y(i) + 15 }, text.length > 12 ? `${text.slice(0, 11)}…` : text),
      drawn("text", { x: x(i) + 7, y: y(i) + 28, class: "p" }, score[i] === null ? `log p ${logP[i]}` : `score ${score[i]}`),
    );
    svg.append(group);
  }
  const list = make("details", {}, make("summary", {}, "the search as a list"));
  list.addEventListener("toggle", () => {
    if (list.open && list.children.length === 1) list.append(make("ol", {}, ...step.map((_, i) => make("li", {}, describe(i)))));
  });
  byId("beam").append(svg, list);
};

const layerName = (name) => {
  const found = name.match(/layers\.(\d+)(?:\.(.+))?$/);
  if (!found) return name.endsWith("embedding") ? "embedding" : "after the last norm";
  return found[2] ? `layer ${Number(found[1]) + 1}: ${found[2].replace("_", "-")}` : `layer ${Number(found[1]) + 1}`;
};

const lens = () => {
  byId("lens-section").hidden = !data.lens.of.length;
  if (!data.lens.of.length) return;
  const card = byId("lens");
  const place = make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "tokens of each layer" });
  const draw = (model) => {
    const head = make("tr", {}, make("td"), ...labels(data.lens.positions).map((text) => make("th", { scope: "col" }, text)));
    const lines = data.lens.of[model].map((layer) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, layerName(layer.name)),
        ...layer.ids.map((found, i) => {
          const text = found.map((id, k) => `${plain(id)} ${share(layer.p[i][k])}`).join(", ");
          const cell = make("td", { title: text }, ...shown(plain(found[0])), make("small", {}, share(layer.p[i][0])));
          const part = Math.min(0.4, layer.p[i][0] * 0.4);
          cell.style.background = `color-mix(in srgb, var(--high) ${Math.round(100 * part)}%, transparent)`;
          if (found[0] === data.written[i]) cell.className = "right";
          return cell;
        }),
      ),
    );
    place.replaceChildren(make("table", { className: "lens" }, head, ...lines.reverse()));
  };
  chosen(card, draw);
  card.append(place);
  draw(0);
};

const norms = () => {
  const card = byId("norms");
  const place = make("div");
  const stacks = [...new Set(Object.keys(data.norms[0]).map((name) => name.split(".")[0]))];
  const state = { model: 0, inner: 0, stack: stacks.length - 1 };
  let undo = () => {};
  const draw = () => {
    undo();
    const stack = stacks[state.stack];
    const of = data.norms[state.model];
    const stream = (name) => /embedding$|layers\.\d+$|\.norm$/.test(name);
    const names = Object.keys(of).filter((name) => name.startsWith(`${stack}.`) && stream(name) === !state.inner);
    const most = Math.max(...names.flatMap((name) => of[name]));
    const rows = names.map(layerName);
    const columns = labels(stack === "encoder" ? "source" : "target");
    undo = matrix(place, {
      rows,
      columns,
      value: (r, c) => number(of[names[r]][c]),
      colour: (r, c) => sequential(of[names[r]][c] / most),
      name: "Norms",
      say: (r, c) => `${rows[r]}, ‹${columns[c]}› at ${c}: ${number(of[names[r]][c])}`,
    });
  };
  const change = (name) => (value) => {
    state[name] = value;
    draw();
  };
  const hasInner = Object.keys(data.norms[0]).some((name) => /attention$|feed_forward$/.test(name));
  card.append(
    make(
      "div",
      { className: "controls" },
      stacks.length > 1 ? radios("stack", stacks.map((name, i) => [i, name]), state.stack, change("stack")) : null,
      hasInner ? radios("vectors", [[0, "after each layer"], [1, "what each sub-layer makes"]], 0, change("inner")) : null,
      data.runtimes.length > 1 ? radios("norms of", runtimeOptions(false), 0, change("model")) : null,
    ),
    place,
  );
  draw();
};

for (const section of [follow, maps, alignment, steps, beam, lens, norms]) {
  byId(section.name).replaceChildren();
  section();
}
