// The filter of a profile: a text, or kernels by family, kernel, phase, layer, part or module. All else is drawn faintly.
names.both = names.name.map((name, n) => `${name} ${names.short[n]}`);
const asked = { words: [], by: {}, hits: [], at: -1 };
// Return the pattern of a module's path and of what is inside it: `layers.*.attn` is the same part of every block.
const inside = (path) => new RegExp(`^${path.split("*").map((word) => word.replace(/[^\w]/g, "\\$&")).join("\\d+")}($|\\.)`);
const valueOf = {
  family: (stream, i) => familyOf(stream.function[i]),
  kernel: (stream, i) => names.name[functions.name[stream.function[i]]],
  phase: (stream, i) => places.phase[stream.place[i]],
  layer: (stream, i) => places.layer[stream.place[i]],
  part: (stream, i) => places.part[stream.place[i]],
  module: (stream, i) => places.module?.[stream.place[i]],
};
function criterion(field, wanted) {
  if (field !== "module") return (stream, i) => valueOf[field](stream, i) === wanted;
  const known = new Map(), fits = inside(wanted);
  return (stream, i) => {
    const path = valueOf.module(stream, i);
    if (wanted === UNATTRIBUTED) return path === null;
    if (!known.has(path)) known.set(path, path !== null && (!wanted || fits.test(path)));
    return known.get(path);
  };
}

// Ask for kernels by {field: value}; {} asks for all.
function ask(by) {
  asked.by = by;
  update();
}
function update() {
  const { by } = asked, kinds = Object.entries(by).map(([field, value]) => criterion(field, value)), any = asked.words.length || kinds.length;
  const found = new Map(); // texts → 1 for each that fits
  const fits = (texts, n) => {
    if (!found.has(texts)) found.set(texts, Uint8Array.from(texts, (text) => asked.words.every((word) => text.toLowerCase().includes(word))));
    return found.get(texts)[n] === 1;
  };
  const isAsked = ({ say }, i) => (!asked.words.length || fits(say.texts, say.text(i))) && (!kinds.length || (say.kernel !== undefined && kinds.every((kind) => kind(...say.kernel(i)))));
  asked.hits = [];
  asked.at = -1;
  let kernels = 0, busy = 0, others = 0;
  for (const row of timeline.rows) {
    row.faint = any ? new Uint8Array(row.size) : null;
    for (let k = 0; any && k < row.size; k++) {
      const i = row.items[k];
      // Kernels alone become faint by family, phase …: of what else runs then, nothing is known.
      if (!isAsked(row, i)) row.faint[k] = asked.words.length || row.say.kernel ? 1 : 0;
      else {
        asked.hits.push({ row, i: k });
        const one = row.say.kernel?.(i);
        if (!one) others += 1;
        else if (isChosen(...one)) {
          kernels += 1;
          busy += one[0].duration[one[1]];
        }
      }
    }
  }
  asked.hits.sort((a, b) => a.row.start[a.i] - b.row.start[b.i]);
  const sum = data.streams.length ? `${count(kernels, "kernel")}, ${time(busy)}: ${share(busy, chosenTime())} of the kernel time of ${chosenName()}` : "";
  const marked = asked.hits.length - others > kernels && `${grouped(asked.hits.length - others)} in all steps, marked above the timeline`;
  byId("found").textContent = any ? [sum, marked, others && `${count(others, "range or call", "ranges and calls")} in all steps`].filter(Boolean).join("; ") || "nothing found" : "";
  byId("asked").replaceChildren(...Object.entries(by).map(([field, value]) => {
    const shown = field === "kernel" ? names.short[names.name.indexOf(value)] : within(value || "the model");
    const chip = button(`${field}: ${shown} ✕`, () => ask(Object.fromEntries(Object.entries(asked.by).filter(([name]) => name !== field))));
    chip.title = value;
    chip.setAttribute("aria-label", `show more than ${field} ${value}`);
    return chip;
  }));
  for (const one of byId("families").children) one.setAttribute("aria-pressed", String(one.dataset.family === by.family));
  timeline.redraw();
}
function search() {
  asked.words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  update();
}
// Pin and show the next hit (-1: the one before) after the last one, at first after the middle of the view; wrap around.
function nextHit(way = 1) {
  const { hits } = asked, middle = (timeline.from + timeline.to) / 2;
  if (!hits.length) return;
  if (asked.at < 0) {
    const after = hits.findIndex(({ row, i }) => row.start[i] + row.duration[i] / 2 > middle);
    asked.at = way > 0 ? Math.max(after, 0) : (after <= 0 ? hits.length : after) - 1;
  } else asked.at = (asked.at + way + hits.length) % hits.length;
  const hit = hits[asked.at];
  timeline.focus(hit, 4);
  timeline.pin(hit);
  byId("live").textContent = `${asked.at + 1} of ${hits.length}: ${hit.row.label(hit.i)}`;
}

// The buttons of the families, with their shares of the kernel time of the chosen steps.
function legend() {
  const times = new Map();
  eachChosenKernel((stream, i) => times.set(familyOf(stream.function[i]), (times.get(familyOf(stream.function[i])) ?? 0) + stream.duration[i]));
  byId("families").replaceChildren(...[...times].sort((a, b) => b[1] - a[1]).map(([family, busy]) => {
    const made = button("", () => ask(asked.by.family === family ? {} : { family }));
    made.dataset.family = family;
    made.setAttribute("aria-pressed", String(asked.by.family === family));
    made.append(swatch(family), family, element("small", share(busy, chosenTime())));
    return made;
  }));
}

// Names in tables ask for their kernels; a step's number shows the step, a range's name finds it.
const LINKED = { family: "family", kernel: "kernel", phase: "phase", layer: "layer", part: "part", module: "module", path: "module" };
const cellText = (cell) => cell.title || cell.textContent;
function linkTables() {
  const used = [...functions.name], known = { family: new Set(used.map((name) => data.families[names.family[name]])), kernel: new Set(used.map((name) => names.name[name])) };
  for (const field of ["phase", "layer", "part", "module"]) known[field] = new Set(places[field]);
  const stepOf = new Map(steps.map((step, i) => [String(step.number), i]));
  const modules = [...known.module].filter((path) => path !== null && path !== undefined);
  const isKnown = (field, value) => (field === "module" ? value && modules.some((path) => inside(value).test(path)) : known[field].has(value));
  const linkRow = (row, columns) => {
    const by = {};
    columns.forEach((column, n) => {
      const cell = row.cells[n], text = cellText(cell), field = LINKED[column];
      if (field && isKnown(field, text)) {
        by[field] = text;
        const wanted = { ...by };
        link(cell, () => ask(wanted));
      } else if (column === "step" && stepOf.has(text)) {
        link(cell, () => chooseStep(stepOf.get(text)));
      } else if (column === "range" && n <= 1) {
        link(cell, () => { byId("search").value = text.trim(); search(); nextHit(); });
      }
    });
  };
  for (const table of document.querySelectorAll("main table[id]")) {
    const columns = [...table.tHead.rows[0].cells].map((head) => head.dataset.column);
    const linkAll = () => { for (const row of table.tBodies[0].rows) linkRow(row, columns); };
    if (table.closest(".long")) whenSeen(table.closest(".long"), linkAll);
    else linkAll();
  }
}
function whenSeen(box, does) {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    does();
  });
  observer.observe(box);
}
function link(cell, does) {
  const made = button(cell.textContent, () => {
    does();
    byId("timeline").scrollIntoView({ block: "nearest" });
  });
  made.className = "link";
  cell.replaceChildren(made);
}
function tableRow(column, value) {
  const table = byId(`table-${column}s`), at = table && [...table.tHead.rows[0].cells].findIndex((head) => head.dataset.column === column);
  return at >= 0 && [...table.tBodies[0].rows].find((row) => cellText(row.cells[at]) === value);
}
function showInTable(column, value) {
  const row = tableRow(column, value);
  row.scrollIntoView({ block: "center" });
  row.querySelector("button")?.focus();
}
