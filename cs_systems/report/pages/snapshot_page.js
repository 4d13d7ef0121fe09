// Allocated memory over time, and the segments at the end, from the JSON in the page. Names are set as text, never as HTML.
const started = performance.now();
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("snapshot").textContent);
const { categories, peak } = data;
const UNATTRIBUTED = "unattributed";
const slug = (category) => category.replaceAll(" ", "-");
const MOST_BANDS = 600; // up to this many allocations in view are separated by lines
const TOP = 24, BOTTOM = 4; // margins of the timeline
let alone = null; // the category that is shown alone

const COLORS = [...categories.map(slug), "even", "odd"];
const fixed = (value) => value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.max(value, 1)))));
function bytes(n) {
  const [unit, name] = bytesUnit(n);
  return `${unit === 1 ? n : fixed(n / unit)} ${name}`;
}
const bytesUnit = (n) => [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([unit]) => n >= unit) ?? [1, "B"];
function time(ns) {
  const [unit, name] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${unit === 1 ? Math.round(ns) : fixed(ns / unit)} ${name}`;
}

// Allocations as columns, by their start. The bands of the others come last; they have no stack.
const allocations = (() => {
  const c = data.allocations, bands = data.rest.bands, one = c.bytes.length, size = one + bands.length;
  const made = { size, one, start: new Float64Array(size), end: new Float64Array(size), bytes: new Float64Array(size), category: new Uint8Array(size), before: new Set(c.before) };
  let at = 0;
  for (let i = 0; i < one; i++) {
    at += c.later_ns[i];
    made.start[i] = at;
    made.end[i] = at + c.duration_ns[i];
  }
  made.bytes.set(c.bytes);
  made.category.set(c.category);
  bands.forEach(([category, from, to, most], n) => {
    Object.assign(made.start, { [one + n]: from });
    Object.assign(made.end, { [one + n]: to });
    made.bytes[one + n] = most;
    made.category[one + n] = category;
  });
  return made;
})();

// Moments at which allocated memory changes, and the bytes of each category from then on.
const levels = (() => {
  const { size, start, end, bytes: given, category } = allocations, count = categories.length;
  const changes = new Float64Array(2 * size), owner = new Uint32Array(2 * size);
  const order = Array.from({ length: 2 * size }, (_, n) => n);
  for (let i = 0; i < size; i++) {
    changes[i] = start[i];
    changes[size + i] = end[i];
    owner[i] = owner[size + i] = i;
  }
  order.sort((a, b) => changes[a] - changes[b] || b - a); // an end before a start
  const at = [], total = [], by = [];
  const now = new Float64Array(count);
  let sum = 0;
  order.forEach((n, k) => {
    const i = owner[n], change = n < size ? given[i] : -given[i];
    now[category[i]] += change;
    sum += change;
    const next = order[k + 1];
    if (next !== undefined && changes[next] === changes[n]) return;
    at.push(changes[n]);
    total.push(sum);
    by.push(...now);
  });
  return { at: Float64Array.from(at), total: Float64Array.from(total), by: Float64Array.from(by), size: at.length };
})();

// Return the index of the last moment at or before t, or -1.
function lastBefore(at, size, t) {
  let low = 0, high = size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

class MemoryChart extends Chart {
  constructor(canvas) {
    super(canvas, [], data.end_ns);
    this.highest = Math.max(peak.bytes, ...data.reserved.map(([, reserved]) => reserved), 1);
    this.item = {
      start: allocations.start,
      duration: allocations.end.map((end, i) => end - allocations.start[i]),
      tip: allocationTip,
    };
    canvas.style.height = ""; // use the height from the style sheet
    this.ready = true;
    this.draw();
  }
  place(amount) { return this.height - BOTTOM - (amount / this.highest) * (this.height - TOP - BOTTOM); }

  draw() {
    this.asked = undefined;
    if (!this.ready) return;
    const { canvas } = this, width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    this.height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = FONT;
    g.textBaseline = "middle";
    this.moments = this.momentsOf(width);
    this.drawStacks(g, width);
    this.drawAxis(g, width);
    this.drawBytes(g, width);
    this.drawBands(g, width);
    this.drawReserved(g, width);
    this.drawPeak(g, width);
  }
  // Return, for each column of pixels, the moment with the highest total.
  momentsOf(width) {
    const found = new Int32Array(width);
    let last = lastBefore(levels.at, levels.size, this.from);
    for (let x = 0; x < width; x++) {
      const until = this.timeAt(x + 1);
      let best = last;
      while (last + 1 < levels.size && levels.at[last + 1] < until) {
        last++;
        if (best < 0 || levels.total[last] > levels.total[best]) best = last;
      }
      found[x] = best;
    }
    return found;
  }
  drawStacks(g, width) {
    const count = categories.length;
    for (let c = 0; c < count; c++) {
      g.fillStyle = colors[slug(categories[c])];
      if (alone !== null && alone !== c) continue;
      for (let x = 0; x < width; x++) {
        const moment = this.moments[x];
        if (moment < 0) continue;
        const own = levels.by[moment * count + c];
        if (own <= 0) continue;
        const bottom = this.place(this.below(moment, c));
        const height = (own / this.highest) * (this.height - TOP - BOTTOM);
        g.fillRect(x, bottom - height, 1, height);
      }
    }
  }
  // Return the bytes of the categories drawn below this one.
  below(moment, category) {
    let sum = 0;
    if (alone === null) for (let c = 0; c < category; c++) sum += levels.by[moment * categories.length + c];
    return sum;
  }
  drawBytes(g, width) {
    const [unit, name] = bytesUnit(this.highest), most = this.highest / unit, raw = most / 5;
    const power = 10 ** Math.floor(Math.log10(raw)), step = power * [1, 2, 5, 10].find((n) => n * power >= raw);
    for (let amount = step; amount <= most; amount += step) {
      const y = this.place(amount * unit);
      g.fillStyle = colors.line;
      g.globalAlpha = 0.6;
      g.fillRect(0, y, width, 1);
      g.globalAlpha = 1;
      label(g, `${Number(amount.toPrecision(6))} ${name}`, 4, y - 7, width);
    }
  }
  // Draw lines between allocations if few are in view, and mark the one under the pointer.
  drawBands(g, width) {
    const { start, end, bytes: given, category, size } = allocations, seen = [];
    for (let i = 0; i < size && seen.length <= MOST_BANDS; i++) if (start[i] < this.to && end[i] > this.from) seen.push(i);
    const hovered = this.hovered?.i;
    if (seen.length > MOST_BANDS && hovered === undefined) return;
    const scale = (this.height - TOP - BOTTOM) / this.highest, lines = seen.length <= MOST_BANDS;
    const of = lines ? seen : Array.from({ length: size }, (_, i) => i).filter((i) => category[i] === category[hovered] && start[i] < this.to && end[i] > this.from);
    for (let x = 0; x < width; x++) {
      const moment = this.moments[x];
      if (moment < 0) continue;
      const t = levels.at[moment], heights = {};
      for (const i of of) {
        if (start[i] > t || end[i] <= t || (alone !== null && category[i] !== alone)) continue;
        const c = category[i], below = (heights[c] ??= this.below(moment, c));
        heights[c] += given[i];
        const top = this.place(below + given[i]), height = given[i] * scale;
        if (lines && height >= 3) {
          g.fillStyle = over[slug(categories[c])];
          g.globalAlpha = 0.25;
          g.fillRect(x, Math.round(top), 1, 1);
          g.globalAlpha = 1;
        }
        if (i === hovered) {
          g.fillStyle = colors.ink;
          g.globalAlpha = 0.35;
          g.fillRect(x, top, 1, Math.max(height, 1));
          g.globalAlpha = 1;
        }
      }
    }
  }
  drawReserved(g, width) {
    if (!this.highest || data.reserved.every(([, reserved]) => !reserved)) return;
    g.strokeStyle = colors.soft;
    g.setLineDash([4, 3]);
    g.beginPath();
    const x = (t) => ((t - this.from) / (this.to - this.from)) * width;
    data.reserved.forEach(([at, reserved], n) => {
      const next = data.reserved[n + 1]?.[0] ?? this.end, y = Math.max(this.place(reserved), TOP) + 0.5;
      g.lineTo(x(at), y);
      g.lineTo(x(next), y);
    });
    g.stroke();
    g.setLineDash([]);
  }
  drawPeak(g, width) {
    const x = ((peak.at_ns - this.from) / (this.to - this.from)) * width;
    if (x < 0 || x > width || alone !== null) return;
    const y = this.place(peak.bytes);
    g.fillStyle = colors.ink;
    g.fillRect(x, y, 1, this.height - y);
    const text = `peak ${bytes(peak.bytes)}`, room = g.measureText(text).width + 8;
    label(g, text, x + room < width ? x + 4 : x - room, y + 9, width);
  }

  // Return the allocation whose band is at a point of the canvas.
  at(x, y) {
    const moment = this.moments?.[Math.round(x)];
    if (moment === undefined || moment < 0 || y < TOP) return null;
    let amount = ((this.height - BOTTOM - y) / (this.height - TOP - BOTTOM)) * this.highest;
    const count = categories.length, t = levels.at[moment];
    let c = alone ?? 0;
    while (alone === null && c < count && amount >= levels.by[moment * count + c]) amount -= levels.by[moment * count + c++];
    if (c >= count || amount < 0) return null;
    const { start, end, bytes: given, category, size } = allocations;
    for (let i = 0; i < size; i++) {
      if (category[i] !== c || start[i] > t || end[i] <= t) continue;
      if (amount < given[i]) return { row: this.item, i };
      amount -= given[i];
    }
    return null;
  }
}

function label(g, text, x, y, width) {
  g.fillStyle = colors.page;
  g.globalAlpha = 0.75;
  g.fillRect(x - 2, y - 7, g.measureText(text).width + 4, 14);
  g.globalAlpha = 1;
  g.fillStyle = colors.ink;
  g.fillText(text, x, y, width);
}
const stackText = (stack) => data.stacks[stack].map((frame) => data.frames[frame]).join("\n");
function allocationTip(i) {
  const { start, end, bytes: given, category, before, one } = allocations, what = categories[category[i]], c = data.allocations;
  if (i >= one) return [`${what}: ${bytes(given[i])}`, `several allocations in one band: their maximum from ${time(start[i])} to ${time(end[i])}`];
  const made = [data.phases[c.phase[i]] && `allocated in ${data.phases[c.phase[i]]}`, data.layers[c.layer[i]]];
  const until = end[i] >= data.end_ns ? "to the end" : `to ${time(end[i])}`;
  return [
    `${what}: ${bytes(given[i])}`,
    data.names[c.name[i]],
    made.filter(Boolean).join(" · "),
    before.has(i) ? `allocated before recording began, alive ${until}` : `alive for ${time(end[i] - start[i])}, from ${time(start[i])} ${until}`,
    c.unasked_bytes[i] && `${bytes(c.unasked_bytes[i])} added by rounding`,
    { full: stackText(c.stack[i]) || "no stack was recorded" },
  ];
}

class BytesChart extends Chart {
  unit() { return bytesUnit(this.to); }
}
// Return two rows for each pool and stream: its segments, and their blocks below.
function segmentRows() {
  const lanes = new Map();
  for (const segment of data.segments) {
    const key = `${segment.pool} pool · stream ${segment.stream}${segment.private ? " · private" : ""}`;
    if (!lanes.has(key)) lanes.set(key, []);
    lanes.get(key).push(segment);
  }
  return [...lanes].flatMap(([key, of]) => {
    const blocks = of.flatMap((segment) => segment.size.map((size, n) => ({ segment, n, size })));
    const whole = of.reduce((sum, segment) => sum + segment.bytes, 0);
    const count = `${of.length} segment${of.length === 1 ? "" : "s"}`;
    return [
      laid(of, (s) => s.bytes, {
        title: `${key} · ${count} · ${bytes(whole)}`,
        color: (s, i) => (i % 2 ? "odd" : "even"),
        label: (s) => bytes(s.bytes),
        tip: (s) => [`segment of ${bytes(s.bytes)}`, `at ${s.address}`, `${bytes(free(s))} free, in ${s.category.filter((c) => c < 0).length} blocks`],
      }),
      laid(blocks, (b) => b.size, {
        color: ({ segment, n }) => (segment.category[n] < 0 ? UNATTRIBUTED : slug(categories[segment.category[n]])),
        label: ({ segment, n }) => data.names[segment.name[n]] ?? categories[segment.category[n]] ?? "free",
        tip: blockTip,
      }),
    ];
  });
}
const free = (s) => s.size.reduce((sum, size, n) => sum + (s.category[n] < 0 ? size : 0), 0);
function blockTip({ segment, n, size }) {
  const state = segment.pending.includes(n) ? "freed; waiting for another stream" : "free";
  return [`${categories[segment.category[n]] ?? state}: ${bytes(size)}`, data.names[segment.name[n]], data.layers[segment.layer[n]],
    `in a segment of ${bytes(segment.bytes)} at ${segment.address}`, segment.category[n] >= 0 && { full: stackText(segment.stack[n]) || "no stack was recorded" }];
}
function laid(items, size, { title, color, label: name, tip: tell }) {
  const duration = items.map(size), start = [];
  duration.reduce((at, length) => (start.push(at), at + length), 0);
  return { title, size: items.length, start, duration, color: (i) => color(items[i], i), label: (i) => name(items[i]), tip: (i) => tell(items[i]) };
}

function legend() {
  const buttons = categories.map((category, c) => {
    const button = document.createElement("button"), swatch = document.createElement("i"), part = document.createElement("small");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    swatch.style.background = `var(--${slug(category)})`;
    part.textContent = bytes(peak.by[c]);
    button.append(swatch, category, part);
    button.addEventListener("click", () => {
      alone = alone === c ? null : c;
      buttons.forEach((other, n) => other.setAttribute("aria-pressed", String(n === alone)));
      timeline.hover(null, null);
      timeline.redraw();
    });
    return button;
  });
  byId("categories").append(...buttons);
}

readColors(COLORS);
const timeline = new MemoryChart(byId("timeline"));
const rows = segmentRows();
const segments = new BytesChart(byId("segments"), rows, Math.max(1, ...rows.map((row) => row.start.at(-1) + row.duration.at(-1))));
timeline.onShow = (from, to) => { byId("shown").textContent = `${time(from)} … ${time(to)}.`; };
for (const chart of [timeline, segments]) chart.tell();
legend();
byId("in").addEventListener("click", () => timeline.zoom(0.5));
byId("out").addEventListener("click", () => timeline.zoom(2));
byId("whole").addEventListener("click", () => timeline.whole());
byId("to-peak").addEventListener("click", () => timeline.show(peak.at_ns - timeline.end / 100, peak.at_ns + timeline.end / 100));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColors(COLORS);
  for (const chart of [timeline, segments]) chart.redraw();
});
Object.assign(document.documentElement.dataset, {
  buildMs: (performance.now() - started).toFixed(1), // reading the data, the levels, the first drawing
  readyMs: performance.now().toFixed(1), // since the browser began to open the page
});
