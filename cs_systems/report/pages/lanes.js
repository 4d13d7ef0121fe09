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
function laneOf({ start, duration }, say, title) {
  const count = start.length, ends = [], sizes = [], at = new Int32Array(count), row = new Uint8Array(count).fill(MOST_ROWS);
  let undrawn = 0;
  for (let i = 0; i < count; i++) {
    // Profilers' clocks are not precise to a nanosecond: ignore such an overlap.
    let free = 0;
    while (free < ends.length && ends[free] > start[i] + 1) free++;
    if (free >= MOST_ROWS) {
      undrawn += 1;
      continue;
    }
    row[i] = free;
    at[i] = sizes[free] ?? 0;
    sizes[free] = at[i] + 1;
    ends[free] = start[i] + duration[i];
  }
  const more = undrawn ? ` · ${undrawn} more overlapping items are not drawn` : "";
  const rows = sizes.map((size, depth) => {
    const items = new Int32Array(size);
    return {
      title: depth ? undefined : title && title + more,
      size, items, say,
      start: new Float64Array(size), duration: new Float64Array(size), shades: new Uint8Array(size),
      label: (k) => say.label(items[k]),
      tip: (k) => say.tip(items[k]),
      details: (k) => say.details(items[k]),
    };
  });
  for (let i = 0, last = null, shade = 0; i < count; i++) {
    if (row[i] === MOST_ROWS) continue;
    const of = rows[row[i]], k = at[i], color = say.color(i, row[i]);
    if (color !== last) shade = palette.shade((last = color));
    of.items[k] = i;
    of.start[k] = start[i];
    of.duration[k] = duration[i];
    of.shades[k] = shade;
  }
  return { rows, hit: (i) => (row[i] < MOST_ROWS ? { row: rows[row[i]], i: at[i] } : null) };
}
