// The icicle: kernel time of the chosen steps, each row dividing the one above it.
const hasModules = places.module?.some((path) => path !== null) ?? false;
const paths = { // of a kernel: [[field, value, colour]] from the top; a value of null has no box
  phase: (p) => [["phase", places.phase[p], phaseColor(places.phase[p])], ["layer", places.layer[p], stripe(places.layer[p])],
    ["part", places.part[p], stripe(places.part[p])]],
  module: (p) => modulePath(places.module[p]),
};
const cutPaths = new Map();
function modulePath(path) {
  if (!cutPaths.has(path)) {
    const words = path === null ? [] : path.split(".");
    cutPaths.set(path, path === null ? [["module", UNATTRIBUTED, UNATTRIBUTED]] : words.map((word, n) => ["module", words.slice(0, n + 1).join("."), stripe(word)]));
  }
  return cutPaths.get(path);
}

function kernelTree(by) {
  const root = node(null, `kernel time of ${chosenName()}`, "even", null);
  eachChosenKernel((stream, i) => {
    const family = familyOf(stream.function[i]), duration = stream.duration[i];
    let here = root;
    add(here, duration);
    for (const [field, value, color] of [...paths[by](stream.place[i]), ["family", family, family]]) {
      add((here = part(here, field, value, color)), duration);
    }
  });
  return root;
}
function icicleRows(by) {
  const isHost = by in trees, root = isHost ? hostTree(by) : kernelTree(by), levels = [];
  lay(root, 0, levels, by !== "phase");
  return levels.filter((boxes) => boxes?.length).map((boxes) => ({
    size: boxes.length, boxes,
    start: boxes.map((box) => box.start),
    duration: boxes.map((box) => box.time),
    shades: boxes.map((box) => palette.shade(box.color)),
    label: (i) => nameOf(boxes[i]),
    tip: (i) => icicleTip(boxes[i], root, isHost ? "call" : "kernel"),
    details: (i) => ({
      heading: lineage(boxes[i]).map(nameOf).join(" → ") || root.value,
      items: [[isHost ? "host time" : "kernel time", time(boxes[i].time)], [isHost ? "calls" : "kernels", grouped(boxes[i].kernels)], [`share of ${chosenName()}`, share(boxes[i].time, root.time)],
        ["mean", time(boxes[i].time / boxes[i].kernels)]],
    }),
  }));
}
const node = (field, value, color, parent) => ({ field, value, color, parent, depth: parent ? parent.depth + 1 : 0, time: 0, kernels: 0, parts: new Map() });
const nameOf = (box) => (box.value === "" ? "the model itself" : box.field === "module" && box.parent?.field === "module" ? box.value.slice(box.parent.value.length + 1) : box.value);
function add(box, duration) {
  box.time += duration;
  box.kernels += 1;
}
function lay(box, start, levels, isLeftHeavy) {
  box.start = start;
  if (box.value !== null) (levels[box.depth] ??= []).push(box);
  const parts = [...box.parts.values()];
  if (isLeftHeavy || parts.every((part) => part.field === "family")) parts.sort((a, b) => b.time - a.time);
  for (const part of parts) {
    lay(part, start, levels, isLeftHeavy);
    start += part.time;
  }
}
function lineage(box) {
  const path = [];
  for (let b = box; b?.field; b = b.parent) if (b.value !== null) path.unshift(b);
  return path;
}
function icicleTip(box, root, what) {
  const parent = lineage(box).at(-2);
  return [lineage(box).map(nameOf).join(" → ") || root.value, `${time(box.time)} in ${count(box.kernels, what)}`,
    `${share(box.time, root.time)} of the ${root.value}`, parent && `${share(box.time, parent.time)} of ${nameOf(parent)}`];
}
// Return the boxes that a kernel is part of.
function boxesOf(chart, by, stream, i) {
  const family = familyOf(stream.function[i]), wanted = [...paths[by](stream.place[i]), ["family", family]].filter(([, value]) => value !== null);
  if (!isChosen(stream, i)) return [];
  return chart.rows.flatMap((row) => row.boxes.flatMap((box, k) => {
    const path = lineage(box);
    return path.length && path.every((b, n) => wanted[n]?.[0] === b.field && wanted[n][1] === b.value) ? [{ row, i: k }] : [];
  }));
}
