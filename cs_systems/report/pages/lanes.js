// Lanes of a timeline: rows of boxes that do not overlap, and the words and colours that timelines share.
const MOST_ROWS = 24;
const PHASES = ["forward", "loss", "backward", "optimizer"];
const phaseColor = (phase) => (PHASES.includes(phase) ? phase : UNATTRIBUTED);
const stripes = new Map();
function stripe(name) { // two shades of grey in turn, the same for a name everywhere
  if (name === UNATTRIBUTED) return UNATTRIBUTED;
  if (!stripes.has(name)) stripes.set(name, stripes.size % 2 ? "odd" : "even");
  return stripes.get(name);
}
const when = (start, duration) => `${time(duration)}, starting at ${time(start)}`;
const exactly = (ns) => `${grouped(ns / 1000)} µs`;

// Items with start and duration, in order → a lane: rows of boxes that do not overlap, each box in the first free row. A
// nested range is thus below the outer one, which occupies its row until it ends. `say` tells of an item: color(i, depth),
// label(i), tip(i), details(i), texts and text(i) for the search, kernel(i) of a kernel.
function laneOf(columns, say, title) {
  const ends = [], found = [], at = new Int32Array(columns.start.length), row = new Uint8Array(columns.start.length).fill(MOST_ROWS);
  let undrawn = 0;
  columns.start.forEach((start, i) => {
    // Profilers' clocks are not precise to a nanosecond: ignore such an overlap.
    let free = 0;
    while (free < ends.length && ends[free] > start + 1) free++;
    if (free >= MOST_ROWS) return void (undrawn += 1);
    const of = (found[free] ??= []);
    row[i] = free;
    at[i] = of.length;
    of.push(i);
    ends[free] = start + columns.duration[i];
  });
  const more = undrawn ? ` · ${undrawn} more overlapping items are not drawn` : "";
  const rows = found.map((of, depth) => ({
    title: depth ? undefined : title && title + more,
    size: of.length,
    items: of,
    say,
    start: Float64Array.from(of, (i) => columns.start[i]),
    duration: Float64Array.from(of, (i) => columns.duration[i]),
    shades: Uint8Array.from(of, (i) => palette.shade(say.color(i, depth))),
    label: (k) => say.label(of[k]),
    tip: (k) => say.tip(of[k]),
    details: (k) => say.details(of[k]),
  }));
  return { rows, hit: (i) => (row[i] < MOST_ROWS ? { row: rows[row[i]], i: at[i] } : null) };
}
