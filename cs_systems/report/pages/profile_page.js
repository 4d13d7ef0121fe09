// The timeline and the icicle of one step, from the JSON in the page. Names from the trace are set as text, never as HTML.
const started = performance.now();
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("profile").textContent);
const { step, names, functions, places } = data;
const UNATTRIBUTED = "unattributed", MOST_ROWS = 24;
const familyOf = (f) => data.families[names.family[functions.name[f]]];
const PHASES = ["forward", "loss", "backward", "optimizer"];
const phaseColor = (phase) => (PHASES.includes(phase) ? phase : UNATTRIBUTED);
const asked = { family: null, names: null }; // highlighted: a family, a set of name indices; null: all

const COLORS = [...data.families, ...PHASES, "even", "odd"];

function time(ns) {
  const [unit, name] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  const value = ns / unit;
  return `${value.toFixed(unit === 1 ? 0 : Math.max(0, 2 - Math.floor(Math.log10(value))))} ${name}`;
}
const share = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)}%`;
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
const at = (start, duration) => `${time(duration)}, starting at ${time(start)}`;
const placeText = (p) => `phase: ${places.phase[p]} · layer: ${places.layer[p]}${places.part[p] ? ` · ${places.part[p]}` : ""}`;
const colorOfLayer = new Map();
function layerColor(layer) {
  if (layer === UNATTRIBUTED) return UNATTRIBUTED;
  if (!colorOfLayer.has(layer)) colorOfLayer.set(layer, colorOfLayer.size % 2 ? "odd" : "even");
  return colorOfLayer.get(layer);
}

// Columns with start and duration, in order → rows of boxes that do not overlap, each box in the first free row.
// A nested range is thus below the outer one, which occupies its row until it ends.
function rowsOf(columns, say, title) {
  const rows = [], ends = [];
  let undrawn = 0;
  columns.start.forEach((start, i) => {
    // Profilers' clocks are not precise to a nanosecond: ignore such an overlap.
    const free = ends.findIndex((end) => end <= start + 1), row = free < 0 ? ends.length : free;
    if (row >= MOST_ROWS) return void (undrawn += 1);
    (rows[row] ??= []).push(i);
    ends[row] = start + columns.duration[i];
  });
  const more = undrawn ? ` · ${undrawn} more overlapping items are not drawn` : "";
  return rows.map((of, depth) => ({
    title: depth || !title ? undefined : title + more,
    size: of.length,
    start: of.map((i) => columns.start[i]),
    duration: of.map((i) => columns.duration[i]),
    ...Object.fromEntries(Object.entries(say).map(([name, tell]) => [name, (k) => tell(of[k], depth)])),
  }));
}

function hostRows() {
  const { ranges } = data;
  const rows = data.threads.flatMap((thread, number) => rowsOf(thread, {
    label: (i) => ranges.name[thread.range[i]],
    color: (i, depth) => {
      const r = thread.range[i];
      return ranges.phase[r] ? phaseColor(ranges.phase[r]) : depth % 2 ? "odd" : "even";
    },
    tip: (i) => [ranges.name[thread.range[i]], at(thread.start[i], thread.duration[i]), "host range"],
  }, `host · ${thread.main ? "main thread" : `thread ${number + 1}`} · ranges`));
  const calls = data.calls.flatMap((thread) => rowsOf(thread, {
    label: (i) => thread.name[i],
    color: () => "other",
    tip: (i) => [thread.name[i], at(thread.start[i], thread.duration[i]), "host call that waits or allocates"],
  }, "host · waits and allocations"));
  return [...rows, ...calls];
}

function deviceRows() {
  const key = (lane) => `${lane.device} ${lane.stream}`;
  const lanes = new Map();
  for (const stream of data.streams) lanes.set(key(stream), { ...stream, stream, copies: null, id: stream.stream });
  for (const copies of data.copies) lanes.set(key(copies), { ...lanes.get(key(copies)), device: copies.device, id: copies.stream, copies });
  return [...lanes.values()].sort((a, b) => a.device - b.device || a.id - b.id).flatMap(({ device, id, stream, copies }) => {
    const title = `GPU ${device} · stream ${id ?? "unknown"}`;
    return [...(stream ? streamRows(stream, title) : []), ...(copies ? copyRows(copies, title) : [])];
  });
}

function streamRows(stream, title) {
  const runs = (field, what, color) => {
    const merged = runsOf(stream, (i) => places[field][stream.place[i]]);
    return rowsOf(merged, {
      label: (i) => merged.name[i],
      color: (i) => color(merged.name[i]),
      tip: (i) => [merged.name[i], at(merged.start[i], merged.duration[i]), `${what}, from its first to its last kernel on this stream`,
        `${count(merged.kernels[i], "kernel")}, ${time(merged.busy[i])} (${share(merged.busy[i], merged.duration[i])} of the time)`],
    }, field === "phase" ? `${title} · phase, layer, ${count(stream.start.length, "kernel")}` : undefined);
  };
  return [...runs("phase", "phase", phaseColor), ...runs("layer", "layer or named module", layerColor), ...rowsOf(stream, {
    label: (i) => names.short[functions.name[stream.function[i]]],
    color: (i) => familyOf(stream.function[i]),
    faint: (i) => !isAsked(stream.function[i]),
    tip: (i) => kernelTip(stream, i),
  })];
}

// Return runs of consecutive kernels with the same `name(i)`, as columns.
function runsOf(stream, name) {
  const runs = { name: [], start: [], duration: [], kernels: [], busy: [] };
  stream.start.forEach((start, i) => {
    const last = runs.name.length - 1;
    if (last < 0 || runs.name[last] !== name(i)) {
      for (const [column, value] of Object.entries({ name: name(i), start, duration: stream.duration[i], kernels: 1, busy: stream.duration[i] })) runs[column].push(value);
    } else {
      runs.duration[last] = Math.max(runs.duration[last], start + stream.duration[i] - runs.start[last]);
      runs.kernels[last] += 1;
      runs.busy[last] += stream.duration[i];
    }
  });
  return runs;
}

function kernelTip(stream, i) {
  const f = stream.function[i], name = functions.name[f], launch = stream.launch[i];
  const shape = [functions.grid[f] && `grid ${functions.grid[f]}`, functions.block[f] && `block ${functions.block[f]}`,
    functions.registers[f] !== null && `${functions.registers[f]} registers`,
    functions.shared_bytes[f] !== null && `${functions.shared_bytes[f].toLocaleString("en")} B shared`];
  return [
    names.short[name],
    at(stream.start[i], stream.duration[i]),
    `family: ${familyOf(f)}`,
    shape.filter(Boolean).join(" · "),
    placeText(stream.place[i]),
    launch === null ? "launch not recorded" : `launch began ${time(Math.max(stream.start[i] - launch, 0))} before the kernel`,
    stream.graph[i] && "in a CUDA graph; the launch time is that of the whole graph",
    { full: names.name[name] },
  ];
}

function copyRows(copies, title) {
  const size = (i) => (copies.bytes[i] === null ? "size unknown" : `${copies.bytes[i].toLocaleString("en")} B`);
  return rowsOf(copies, {
    label: (i) => copies.kind[i],
    color: () => "copy",
    tip: (i) => [copies.kind[i], at(copies.start[i], copies.duration[i]), size(i)],
  }, `${title} · ${count(copies.start.length, "copy").replace("copys", "copies")}`);
}

// Step → phase → layer → part → family. A kernel outside all parts of a block has no box on that level.
function icicleRows() {
  const root = node("kernel time of the step", "even", 0);
  for (const stream of data.streams) {
    stream.start.forEach((_, i) => {
      const p = stream.place[i], family = familyOf(stream.function[i]);
      const path = [[places.phase[p], phaseColor(places.phase[p])], [places.layer[p], layerColor(places.layer[p])],
        [places.part[p], layerColor(places.part[p])], [family, family]];
      let here = root;
      add(here, stream.duration[i]);
      for (const [name, color] of path) {
        if (!here.parts.has(name)) here.parts.set(name, node(name, color, here.depth + 1, here));
        add((here = here.parts.get(name)), stream.duration[i]);
      }
    });
  }
  const levels = Array.from({ length: 5 }, () => []);
  lay(root, 0, levels);
  return levels.filter((boxes) => boxes.length).map((boxes) => ({
    size: boxes.length,
    start: boxes.map((box) => box.start),
    duration: boxes.map((box) => box.time),
    label: (i) => boxes[i].name,
    color: (i) => boxes[i].color,
    tip: (i) => icicleTip(boxes[i], root),
  }));
}
const node = (name, color, depth, parent) => ({ name, color, depth, parent, time: 0, kernels: 0, parts: new Map() });
function add(box, duration) {
  box.time += duration;
  box.kernels += 1;
}
function lay(box, start, levels) {
  box.start = start;
  if (box.name !== null) levels[box.depth].push(box);
  const parts = [...box.parts.values()];
  if (box.depth === 3) parts.sort((a, b) => b.time - a.time);
  for (const part of parts) {
    lay(part, start, levels);
    start += part.time;
  }
}
function icicleTip(box, root) {
  const path = [];
  for (let b = box; b !== root && b; b = b.parent) if (b.name !== null) path.unshift(b.name);
  return [path.join(" → ") || root.name, `${time(box.time)} in ${count(box.kernels, "kernel")}`,
    `${share(box.time, root.time)} of the step's kernel time`,
    box.parent && box.parent !== root && `${share(box.time, box.parent.time)} of ${box.parent.name ?? box.parent.parent.name}`];
}

const isAsked = (f) => (asked.family === null || familyOf(f) === asked.family) && (!asked.names || asked.names.has(functions.name[f]));
function eachKernel(use) {
  for (const stream of data.streams) stream.function.forEach((f, i) => use(f, stream.duration[i]));
}

function highlight() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (name) => words.every((word) => name.toLowerCase().includes(word));
  asked.names = words.length ? new Set(names.name.flatMap((name, n) => (fits(`${name} ${names.short[n]}`) ? [n] : []))) : null;
  let kernels = 0, busy = 0;
  eachKernel((f, duration) => {
    if (!isAsked(f)) return;
    kernels += 1;
    busy += duration;
  });
  const all = asked.names === null && asked.family === null;
  byId("found").textContent = all ? "" : `${count(kernels, "kernel")}, ${time(busy)}: ${share(busy, step.kernel_ns)} of the kernel time`;
  timeline.redraw();
}

// Zoom to the next highlighted kernel after the middle of the timeline; wrap from the last to the first.
function next() {
  if (asked.names === null && asked.family === null) return;
  const middle = (timeline.from + timeline.to) / 2, found = [];
  for (const row of timeline.rows) {
    for (let i = 0; row.faint && i < row.size; i++) if (!row.faint(i)) found.push({ row, i });
  }
  const centre = ({ row, i }) => row.start[i] + row.duration[i] / 2;
  found.sort((a, b) => centre(a) - centre(b));
  const hit = found.find((one) => centre(one) > middle + 1) ?? found[0];
  if (hit) timeline.focus(hit, 4);
}

function legend() {
  const times = new Map();
  eachKernel((f, duration) => times.set(familyOf(f), (times.get(familyOf(f)) ?? 0) + duration));
  const buttons = [...times].sort((a, b) => b[1] - a[1]).map(([family, busy]) => {
    const button = document.createElement("button"), swatch = document.createElement("i"), part = document.createElement("small");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    swatch.style.background = `var(--${family})`;
    part.textContent = share(busy, step.kernel_ns);
    button.append(swatch, family, part);
    button.addEventListener("click", () => {
      asked.family = asked.family === family ? null : family;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button && asked.family !== null));
      highlight();
    });
    return button;
  });
  byId("families").append(...buttons);
}

readColors(COLORS);
const timeline = new Chart(byId("timeline"), [...hostRows(), ...deviceRows()], step.end_ns);
const charts = [timeline];
timeline.onShow = (from, to) => { byId("shown").textContent = `${time(from)} … ${time(to)} of the step.`; };
byId("in").addEventListener("click", () => timeline.zoom(0.5));
byId("out").addEventListener("click", () => timeline.zoom(2));
byId("whole").addEventListener("click", () => timeline.whole());
if (step.kernels) { // a trace of a CPU has none
  charts.push(new Chart(byId("icicle"), icicleRows(), Math.max(step.kernel_ns, 1)));
  legend();
  byId("search").addEventListener("input", highlight);
  byId("search").addEventListener("keydown", (event) => { if (event.key === "Enter") next(); });
}
for (const chart of charts) chart.tell();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColors(COLORS);
  for (const chart of charts) chart.redraw();
});
Object.assign(document.documentElement.dataset, {
  buildMs: (performance.now() - started).toFixed(1), // reading the data, building the rows, the first drawing
  readyMs: performance.now().toFixed(1), // since the browser began to open the page
});
