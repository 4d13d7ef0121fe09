// The rows of the timeline: the steps; of each stream its phases, layers, kernels and copies; of each thread its launches,
// operators, ranges and waits.
function span(columns, i, more = []) {
  const { start, duration } = columns, step = stepAt(start[i]);
  return [["duration", exactly(duration[i])], ["starts at", exactly(start[i])],
    step >= 0 && ["in step", `${steps[step].number}, ${exactly(start[i] - steps[step].start_ns)} after it begins`], ...more].filter(Boolean);
}

const lanes = { operators: new Map(), launches: new Map(), kernels: new Map() };
const stepColumns = { start: stepStarts, duration: steps.map((step) => step.wall_ns), number: steps.map((step) => step.number) };
function stepRows() {
  const columns = stepColumns;
  const title = (i) => `step ${steps[i].number}`;
  return laneOf(columns, {
    label: title, color: (i) => (i % 2 ? "odd" : "even"), texts: steps.map((_, i) => title(i)), text: (i) => i,
    tip: (i) => [title(i), when(columns.start[i], columns.duration[i]), count(steps[i].kernels, "kernel")],
    details: (i) => ({
      heading: title(i),
      items: [["wall clock", time(steps[i].wall_ns)], ["kernels", grouped(steps[i].kernels)], ["sum of kernel times", time(steps[i].kernel_ns)], ["range", steps[i].name]],
      actions: [["show this step", () => chooseStep(i)]],
    }),
  }, "steps").rows;
}
function hostRows() {
  const threads = new Set([...data.threads, ...data.operators, ...data.calls].map((lane) => lane.thread).concat([...launches.keys()]));
  const of = (list, thread) => list.filter((lane) => lane.thread === thread);
  return [...threads].sort((a, b) => a - b).flatMap((thread) => {
    const title = `host · ${data.threads.some((lane) => lane.thread === thread && lane.main) ? "main thread" : `thread ${thread + 1}`}`;
    return [...(launches.has(thread) ? launchRows(thread, title) : []),
      ...of(data.threads, thread).flatMap((lane) => rangeRows(lane, title)),
      ...of(data.operators, thread).flatMap((lane) => operatorRows(lane, title)),
      ...of(data.calls, thread).flatMap((lane) => callRows(lane, title))];
  });
}
function rangeRows(lane, title) {
  const { ranges } = data, name = (i) => ranges.name[lane.range[i]], phase = (i) => ranges.phase[lane.range[i]];
  return laneOf(lane, {
    label: name, texts: ranges.name, text: (i) => lane.range[i],
    color: (i, depth) => (phase(i) ? phaseColor(phase(i)) : depth % 2 ? "odd" : "even"),
    tip: (i) => [name(i), when(lane.start[i], lane.duration[i]), "host range"],
    details: (i) => ({ heading: name(i), items: span(lane, i, [["kind", "host range"], ["phase", phase(i)], ["layer", ranges.layer[lane.range[i]]]]), actions: [selecting(lane, i)] }),
  }, `${title} · ranges`).rows;
}
const selecting = ({ start, duration }, i) => ["sum up this range", () => timeline.select(start[i], start[i] + duration[i])];
function operatorRows(lane, title) {
  const name = (i) => data.operator_names[lane.name[i]];
  const made = laneOf(lane, {
    label: name, texts: data.operator_names, text: (i) => lane.name[i],
    color: (i, depth) => (depth % 2 ? "odd" : "even"),
    tip: (i) => [name(i), when(lane.start[i], lane.duration[i]), "operator"],
    details: (i) => operatorDetails(lane, i, name(i)),
  }, `${title} · operators${data.hidden_operators ? ` · the ${grouped(data.hidden_operators)} shortest are not drawn` : ""}`);
  lanes.operators.set(lane.thread, made);
  return made.rows;
}
function operatorDetails(lane, i, name) {
  const of = launches.get(lane.thread), kernels = [];
  for (let k = of ? firstAtOrAfter(of.start, lane.start[i]) : 0; of && of.start[k] < lane.start[i] + lane.duration[i]; k++) kernels.push(...of.kernels(k));
  const busy = kernels.reduce((sum, [stream, k]) => sum + stream.duration[k], 0);
  return {
    heading: name,
    items: span(lane, i, [["kind", "operator"], ["launches", kernels.length ? `${count(kernels.length, "kernel")}, ${time(busy)}` : "no kernel"]]),
    actions: [kernels.length && ["to its first kernel", () => pinKernel(...kernels[0])], selecting(lane, i)],
  };
}
function callRows(lane, title) {
  return laneOf(lane, {
    label: (i) => lane.name[i], color: () => "other", texts: lane.name, text: (i) => i,
    tip: (i) => [lane.name[i], when(lane.start[i], lane.duration[i]), "host call that waits or allocates"],
    details: (i) => ({ heading: lane.name[i], items: span(lane, i, [["kind", "host call that waits or allocates"]]), actions: [selecting(lane, i)] }),
  }, `${title} · waits and allocations`).rows;
}
// Return the innermost operator of a thread at time t, as a link to it.
function operatorAt(thread, t) {
  for (const row of [...(lanes.operators.get(thread)?.rows ?? [])].reverse()) {
    const i = firstEnding(row, t);
    if (i < row.size && row.start[i] <= t) return { text: within(row.label(i)), does: () => timeline.pin({ row, i }, true) };
  }
  return null;
}

function deviceRows() {
  const key = (lane) => `${lane.device} ${lane.stream}`;
  const found = new Map();
  for (const stream of data.streams) found.set(key(stream), { device: stream.device, id: stream.stream, stream });
  for (const copies of data.copies) found.set(key(copies), { device: copies.device, id: copies.stream, ...found.get(key(copies)), copies });
  return [...found.values()].sort((a, b) => a.device - b.device || a.id - b.id).flatMap(({ device, id, stream, copies }) => {
    const title = `GPU ${device} · stream ${id ?? "unknown"}`;
    return [...(stream ? streamRows(stream, title) : []), ...(copies ? copyRows(copies, title) : [])];
  });
}
function streamRows(stream, title) {
  const runs = (field, what, color) => {
    const merged = runsOf(stream, (i) => places[field][stream.place[i]]);
    const about = (i) => [`${what}, from its first to its last kernel on this stream`, `${count(merged.kernels[i], "kernel")}, ${time(merged.busy[i])} (${share(merged.busy[i], merged.duration[i])} of the time)`];
    return laneOf(merged, {
      label: (i) => merged.name[i], color: (i) => color(merged.name[i]), texts: merged.name, text: (i) => i,
      tip: (i) => [merged.name[i], when(merged.start[i], merged.duration[i]), ...about(i)],
      details: (i) => ({
        heading: merged.name[i],
        items: span(merged, i, [["kind", about(i)[0]], ["kernels", about(i)[1]]]),
        actions: [[`only this ${field}`, () => ask({ [field]: merged.name[i] })], selecting(merged, i)],
      }),
    }, field === "phase" ? `${title} · phase, layer, ${count(stream.start.length, "kernel")}` : undefined).rows;
  };
  const short = (i) => names.short[functions.name[stream.function[i]]];
  const kernels = laneOf(stream, {
    label: short, color: (i) => familyOf(stream.function[i]),
    texts: names.both, text: (i) => functions.name[stream.function[i]], kernel: (i) => [stream, i],
    tip: (i) => kernelTip(stream, i),
    details: (i) => kernelDetails(stream, i),
  });
  lanes.kernels.set(stream, kernels);
  return [...runs("phase", "phase", phaseColor), ...runs("layer", "layer or named module", stripe), ...kernels.rows];
}
// Return runs of consecutive kernels of a step with the same `name(i)`, as columns.
function runsOf(stream, name) {
  const runs = { name: [], start: [], duration: [], kernels: [], busy: [] }, { start, duration, step } = stream;
  for (let i = 0, last = -1; i < start.length; i++) {
    const named = name(i);
    if (last < 0 || runs.name[last] !== named || step[i] !== step[i - 1]) {
      last = runs.name.push(named) - 1;
      runs.start.push(start[i]);
      runs.duration.push(duration[i]);
      runs.kernels.push(1);
      runs.busy.push(duration[i]);
    } else {
      runs.duration[last] = Math.max(runs.duration[last], start[i] + duration[i] - runs.start[last]);
      runs.kernels[last] += 1;
      runs.busy[last] += duration[i];
    }
  }
  return runs;
}

function shapeOf(f) {
  return [functions.grid[f] && `grid ${functions.grid[f]}`, functions.block[f] && `block ${functions.block[f]}`,
    functions.registers[f] !== null && `${functions.registers[f]} registers`,
    functions.shared_bytes[f] !== null && `${grouped(functions.shared_bytes[f])} B shared`].filter(Boolean).join(" · ");
}
function kernelTip(stream, i) {
  const f = stream.function[i], p = stream.place[i];
  return [
    names.short[functions.name[f]],
    when(stream.start[i], stream.duration[i]),
    `family: ${familyOf(f)}`,
    shapeOf(f),
    `phase: ${places.phase[p]} · layer: ${places.layer[p]}${places.part[p] ? ` · ${places.part[p]}` : ""}`,
    stream.launch[i] === null ? "launch not recorded" : `launch began ${time(Math.max(stream.start[i] - stream.launch[i], 0))} before the kernel`,
    stream.graph[i] && "in a CUDA graph; the launch time is that of the whole graph",
    { full: names.name[functions.name[f]] },
  ];
}
function kernelDetails(stream, i) {
  const f = stream.function[i], p = stream.place[i], name = functions.name[f], alike = { calls: 0, busy: 0 };
  for (const other of data.streams) {
    other.function.forEach((g, k) => {
      if (functions.name[g] !== name || other.step[k] !== stream.step[i]) return;
      alike.calls += 1;
      alike.busy += other.duration[k];
    });
  }
  const only = (field, value) => value && { text: value, does: () => ask({ [field]: value }) };
  const launched = stream.launch[i] !== null, inStep = steps[stream.step[i]];
  return {
    heading: names.short[name],
    items: [
      ...span(stream, i),
      ["family", only("family", familyOf(f))], ["phase", only("phase", places.phase[p])],
      ["layer", only("layer", places.layer[p])], ["part", only("part", places.part[p])],
      ["module", only("module", places.module?.[p])],
      ["shape", shapeOf(f)],
      ["this kernel", `${count(alike.calls, "call")} in this step, ${time(alike.busy)}${inStep ? `: ${share(alike.busy, inStep.kernel_ns)} of its kernel time` : ""}`],
      ["launch", launched ? { text: `began ${time(Math.max(stream.start[i] - stream.launch[i], 0))} before the kernel`, does: () => pinLaunch(stream, i) } : "not recorded"],
      ["operator", launched && operatorAt(stream.thread[i], stream.launch[i])],
      ["CUDA graph", stream.graph[i] === 1 && "yes: the launch is that of the whole graph"],
    ],
    long: names.name[name],
    actions: [launched && ["to its launch (l)", () => pinLaunch(stream, i)], ["all calls of this kernel", () => ask({ kernel: names.name[name] })],
      tableRow("kernel", names.name[name]) && ["to the table", () => showInTable("kernel", names.name[name])]],
  };
}
function copyRows(copies, title) {
  const size = (i) => (copies.bytes[i] === null ? "size unknown" : `${grouped(copies.bytes[i])} B`);
  const rate = (i) => copies.bytes[i] !== null && copies.duration[i] > 0 && `${digits(copies.bytes[i] / copies.duration[i])} GB/s`;
  return laneOf(copies, {
    label: (i) => copies.kind[i], color: () => "copy", texts: copies.kind, text: (i) => i,
    tip: (i) => [copies.kind[i], when(copies.start[i], copies.duration[i]), size(i)],
    details: (i) => ({ heading: copies.kind[i], items: span(copies, i, [["size", size(i)], ["rate", rate(i)]]) }),
  }, `${title} · ${count(copies.start.length, "copy", "copies")}`).rows;
}
