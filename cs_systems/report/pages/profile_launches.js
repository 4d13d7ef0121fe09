// Launches: the calls of the host that started kernels. The kernels of a CUDA graph share one. Arrows join them.
const launches = new Map(); // thread → { start, duration, kernels(i): [[stream, k]] of each launch }, in order
// Each stream gets `call`: the launch of each kernel, as an index in `launches` of its thread, or -1.
for (const stream of data.streams) stream.call = new Int32Array(stream.start.length).fill(-1);
{
  const threads = new Map(); // thread → its kernels as numbers: first those of the first stream
  const before = [0]; // the number of kernels in the streams before each
  for (const { launch, thread } of data.streams) {
    const offset = before.at(-1);
    for (let i = 0; i < launch.length; i++) {
      if (launch[i] === null) continue;
      if (!threads.has(thread[i])) threads.set(thread[i], []);
      threads.get(thread[i]).push(offset + i);
    }
    before.push(offset + launch.length);
  }
  const at = new Float64Array(before.at(-1)), streamOf = new Uint16Array(before.at(-1));
  data.streams.forEach(({ launch }, n) => {
    at.set(launch, before[n]);
    streamOf.fill(n, before[n], before[n + 1]);
  });
  for (const [thread, kernels] of threads) {
    const order = Uint32Array.from(kernels);
    if (order.some((kernel, k) => k && at[kernel] < at[order[k - 1]])) order.sort((a, b) => at[a] - at[b] || a - b);
    launches.set(thread, launchesOf(order, at, streamOf, before));
  }
}
// Return the launches of kernels in the order of their launch; the kernels of a graph have one start of launch.
function launchesOf(order, at, streamOf, before) {
  const first = [], start = [], duration = [];
  for (let k = 0; k < order.length; k++) {
    const kernel = order[k], n = streamOf[kernel], stream = data.streams[n], i = kernel - before[n];
    if (!start.length || start[start.length - 1] !== at[kernel]) {
      first.push(k);
      start.push(at[kernel]);
      duration.push(stream.launching[i] ?? 0);
    }
    stream.call[i] = start.length - 1;
  }
  first.push(order.length);
  const size = (i) => first[i + 1] - first[i];
  const kernel = (k) => [data.streams[streamOf[order[k]]], order[k] - before[streamOf[order[k]]]];
  return { start, duration, size, first: (i) => kernel(first[i]), kernels: (i) => Array.from({ length: size(i) }, (_, k) => kernel(first[i] + k)) };
}

function launchRows(thread, title) {
  const of = launches.get(thread), first = of.first, name = ([stream, k]) => names.short[functions.name[stream.function[k]]];
  const say = (i) => (of.size(i) > 1 ? `graph of ${grouped(of.size(i))} kernels` : name(first(i)));
  const made = laneOf(of, {
    label: say, color: () => "odd", texts: [], text: () => -1,
    tip: (i) => [`launch: ${say(i)}`, when(of.start[i], of.duration[i]), waited(...first(i))],
    details: (i) => ({
      heading: `launch: ${say(i)}`,
      items: span(of, i, [["kernel", { text: name(first(i)), does: () => pinKernel(...first(i)) }], ["kernel begins", waited(...first(i))], ["operator", operatorAt(thread, of.start[i])]]),
      actions: [["to its kernel (l)", () => pinKernel(...first(i))]],
    }),
  }, `${title} · launches`);
  lanes.launches.set(thread, made);
  made.rows.forEach((row) => { row.launch = (k) => of.kernels(row.items[k]); });
  return made.rows;
}
const waited = (stream, i) => `${time(Math.max(stream.start[i] - stream.launch[i], 0))} after its launch`;

// Arrows between a pinned kernel and its launch, or a pinned launch and its kernels.
const MOST_ARROWS = 200;
function drawArrows(g) {
  const hit = timeline.pinned;
  if (!hit) return;
  const kernels = hit.row.launch?.(hit.i) ?? (hit.row.say.kernel ? [hit.row.say.kernel(hit.row.items[hit.i])] : []);
  for (const [stream, i] of kernels.slice(0, MOST_ARROWS)) {
    const from = launchHit(stream, i), to = lanes.kernels.get(stream).hit(i);
    if (from && to) drawArrow(g, timeline.xAt(from.row.start[from.i]), from.row.top, timeline.xAt(to.row.start[to.i]), to.row.top + ROW);
  }
}
// Draw an arrow upwards: the streams are above the threads.
function drawArrow(g, x, y, toX, toY) {
  const bend = Math.max((y - toY) / 2, 12);
  g.strokeStyle = g.fillStyle = palette.css.ink;
  g.lineWidth = 1.5;
  g.beginPath();
  g.moveTo(x, y);
  g.bezierCurveTo(x, y - bend, toX, toY + bend, toX, toY + 5);
  g.stroke();
  g.beginPath();
  g.moveTo(toX, toY);
  g.lineTo(toX - 4, toY + 7);
  g.lineTo(toX + 4, toY + 7);
  g.fill();
}
const launchHit = (stream, i) => (stream.call[i] < 0 ? null : lanes.launches.get(stream.thread[i]).hit(stream.call[i]));
function pinKernel(stream, i) {
  const hit = lanes.kernels.get(stream).hit(i);
  if (hit) timeline.pin(hit, true);
}
function pinLaunch(stream, i) {
  const hit = launchHit(stream, i);
  if (hit) timeline.pin(hit, true);
}
// Go from a pinned kernel to its launch, or back.
function followLaunch() {
  const hit = timeline.pinned;
  if (hit?.row.launch) pinKernel(...hit.row.launch(hit.i)[0]);
  else if (hit?.row.say.kernel) pinLaunch(...hit.row.say.kernel(hit.row.items[hit.i]));
}
