// Launches: the calls of the host that started kernels. The kernels of a CUDA graph share one. Arrows join them.
const launches = new Map(); // thread → { start, duration, kernels: [[stream, i]] of each launch }, in order
// Each stream gets `call`: the launch of each kernel, as an index in `launches` of its thread, or -1.
for (const stream of data.streams) stream.call = new Int32Array(stream.start.length).fill(-1);
{
  const launched = data.streams.flatMap((stream) => stream.launch.flatMap((at, i) => (at === null ? [] : [[stream, i]])));
  launched.sort(([a, i], [b, k]) => a.launch[i] - b.launch[k]);
  for (const [stream, i] of launched) {
    const thread = stream.thread[i];
    if (!launches.has(thread)) launches.set(thread, { start: [], duration: [], kernels: [] });
    const of = launches.get(thread);
    if (of.start.at(-1) !== stream.launch[i]) {
      of.start.push(stream.launch[i]);
      of.duration.push(stream.launching[i] ?? 0);
      of.kernels.push([]);
    }
    of.kernels.at(-1).push([stream, i]);
    stream.call[i] = of.start.length - 1;
  }
}

function launchRows(thread, title) {
  const of = launches.get(thread), first = (i) => of.kernels[i][0], name = ([stream, k]) => names.short[functions.name[stream.function[k]]];
  const say = (i) => (of.kernels[i].length > 1 ? `graph of ${grouped(of.kernels[i].length)} kernels` : name(first(i)));
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
  made.rows.forEach((row) => { row.launch = (k) => of.kernels[row.items[k]]; });
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
