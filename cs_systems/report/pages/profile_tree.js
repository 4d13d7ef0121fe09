// The host's time in the chosen steps as a tree: nested ranges, or these with operators and calls that wait. Boxes of one
// path are summed, and the longest stands at the left.
const rangesOf = (lane) => ({
  lane, field: "range", name: (i) => data.ranges.name[lane.range[i]],
  color: (i) => (data.ranges.phase[lane.range[i]] ? phaseColor(data.ranges.phase[lane.range[i]]) : stripe(data.ranges.name[lane.range[i]])),
});
const operatorsOf = (lane) => ({
  lane, field: "operator", name: (i) => data.operator_names[lane.name[i]], color: (i) => stripe(data.operator_names[lane.name[i]]),
});
const callsOf = (lane) => ({ lane, field: "call", name: (i) => lane.name[i], color: () => "other" });
const trees = {
  range: () => data.threads.map(rangesOf),
  host: () => [...data.threads.map(rangesOf), ...data.operators.map(operatorsOf), ...data.calls.map(callsOf)],
};

function hostTree(by) {
  const root = node(null, `host time of ${chosenName()}`, "even", null), threads = new Map();
  for (const one of trees[by]()) {
    const items = threads.get(one.lane.thread) ?? threads.set(one.lane.thread, []).get(one.lane.thread);
    one.lane.start.forEach((start, i) => {
      const step = stepAt(start);
      if (chosen.step === null ? step >= 0 : step === chosen.step) items.push({ one, i, start, end: start + one.lane.duration[i] });
    });
  }
  for (const [thread, items] of [...threads].sort((a, b) => a[0] - b[0])) {
    const name = data.threads.some((lane) => lane.thread === thread && lane.main) ? "main thread" : `thread ${thread + 1}`;
    const top = part(root, "thread", name, "even"), open = [{ box: top, end: Infinity }];
    items.sort((a, b) => a.start - b.start || b.end - a.end);
    for (const { one, i, start, end } of items) {
      while (open.at(-1).end <= start + 1) open.pop(); // clocks of profilers are not precise to a nanosecond
      const outer = open.at(-1), within = Math.min(end, outer.end), box = part(outer.box, one.field, one.name(i), one.color(i));
      add(box, within - start);
      if (outer.box === top) {
        add(top, within - start);
        add(root, within - start);
      }
      open.push({ box, end: within });
    }
    if (!top.time) root.parts.delete(`thread ${name}`);
  }
  return root;
}
// Return the box of a value inside another one, made on first use.
function part(box, field, value, color) {
  const key = `${field} ${value}`;
  if (!box.parts.has(key)) box.parts.set(key, node(field, value, color, box));
  return box.parts.get(key);
}
