// Allocated memory over time, stacked by category. A pinned allocation's neighbours are those before and after it in time (← →),
// and those above and below it in the stack (↑ ↓).
const MOST_BANDS = 600; // up to this many allocations in view are separated by lines
const TOP = 24, BOTTOM = 4; // margins
class MemoryChart extends Chart {
  constructor(canvas) {
    super(canvas, [], data.end_ns);
    this.highest = Math.max(peak.bytes, ...data.reserved.map(([, reserved]) => reserved), 1);
    this.item = {
      size: allocations.size,
      start: allocations.start,
      duration: allocations.end.map((end, i) => end - allocations.start[i]),
      label: (i) => `${categories[allocations.category[i]]}: ${bytes(allocations.bytes[i])}`,
      tip: allocationTip,
      details: allocationDetails,
    };
    this.cursor = null; // time of the event that is shown
  }
  take() { Object.assign(this, { rows: [], hovered: null, pinned: null, marked: [] }); }
  place(amount) { return this.height - BOTTOM - (amount / this.highest) * (this.height - TOP - BOTTOM); }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.height = this.canvas.clientHeight;
    const g = this.begin();
    this.moments = this.momentsOf(width);
    this.runs = columnRuns(this.moments);
    this.drawStacks(g);
    this.drawAxis(g, width);
    const amounts = this.drawBytes(g, width);
    this.drawBands(g);
    const labels = [this.drawPeak(g, width), this.drawReserved(g, width), ...amounts].filter(Boolean); // the first has its choice
    this.drawCursor(g, width);
    drawLabels(g, labels, width);
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
  drawStacks(g) {
    const count = categories.length;
    for (let c = 0; c < count; c++) {
      g.fillStyle = palette.css[slug(categories[c])];
      if (alone !== null && alone !== c) continue;
      for (const { moment, x, wide } of this.runs) {
        const own = levels.by[moment * count + c];
        if (own <= 0) continue;
        const bottom = this.place(this.below(moment, c));
        const height = (own / this.highest) * (this.height - TOP - BOTTOM);
        g.fillRect(x, bottom - height, wide, height);
      }
    }
  }
  // Return the bytes of the categories drawn below this one.
  below(moment, category) {
    let sum = 0;
    if (alone === null) for (let c = 0; c < category; c++) sum += levels.by[moment * categories.length + c];
    return sum;
  }
  // Draw lines at round amounts, and return their labels.
  drawBytes(g, width) {
    const labels = [];
    const [unit, name] = bytesUnit(this.highest), most = this.highest / unit, raw = most / 5;
    const power = 10 ** Math.floor(Math.log10(raw)), step = power * [1, 2, 5, 10].find((n) => n * power >= raw);
    for (let amount = step; amount <= most; amount += step) {
      const y = this.place(amount * unit);
      g.fillStyle = palette.css.line;
      g.globalAlpha = 0.6;
      g.fillRect(0, y, width, 1);
      g.globalAlpha = 1;
      labels.push({ text: `${Number(amount.toPrecision(6))} ${name}`, places: () => [[4, y - 7]] });
    }
    return labels;
  }
  // Draw lines between allocations if few are in view, and shade the pinned one, the one under the pointer and those found.
  drawBands(g) {
    const { start, end, bytes: given, category, size } = allocations, seen = [];
    for (let i = 0; i < size && seen.length <= MOST_BANDS; i++) if (start[i] < this.to && end[i] > this.from) seen.push(i);
    const lines = seen.length <= MOST_BANDS, shaded = new Map(found.hits.slice(0, MOST_BANDS).map((i) => [i, 0.3]));
    if (this.hovered) shaded.set(this.hovered.i, 0.35);
    if (this.pinned) shaded.set(this.pinned.i, 0.65);
    if (!lines && !shaded.size) return;
    const kinds = new Set([...shaded.keys()].map((i) => category[i])), scale = (this.height - TOP - BOTTOM) / this.highest;
    const of = lines ? seen : Array.from({ length: size }, (_, i) => i).filter((i) => kinds.has(category[i]) && start[i] < this.to && end[i] > this.from);
    for (const { moment, x, wide } of this.runs) {
      const t = levels.at[moment], heights = {};
      for (const i of of) {
        if (start[i] > t || end[i] <= t || (alone !== null && category[i] !== alone)) continue;
        const c = category[i], below = (heights[c] ??= this.below(moment, c));
        heights[c] += given[i];
        const top = this.place(below + given[i]), height = given[i] * scale, opacity = shaded.get(i);
        if (lines && height >= 3) this.fill(g, palette.over[slug(categories[c])], 0.25, x, Math.round(top), wide, 1);
        if (opacity) this.fill(g, palette.css.ink, opacity, x, top, wide, Math.max(height, 1));
      }
    }
  }
  fill(g, color, opacity, x, top, width, height) {
    g.fillStyle = color;
    g.globalAlpha = opacity;
    g.fillRect(x, top, width, height);
    g.globalAlpha = 1;
  }
  // Draw the reserved memory as a dashed line, and return its label: at the right below the line, or beside the peak's.
  drawReserved(g, width) {
    if (!this.highest || data.reserved.every(([, reserved]) => !reserved)) return null;
    g.strokeStyle = palette.css.soft;
    g.setLineDash([4, 3]);
    g.beginPath();
    const x = (t) => ((t - this.from) / (this.to - this.from)) * width;
    data.reserved.forEach(([at, reserved], n) => {
      const next = data.reserved[n + 1]?.[0] ?? this.end, y = Math.max(this.place(reserved), TOP) + 0.5;
      g.lineTo(x(at), y);
      g.lineTo(x(next), y);
    });
    g.lineWidth = 1;
    g.stroke();
    g.setLineDash([]);
    const last = data.reserved.findLast(([at]) => at <= this.to) ?? data.reserved[0];
    const y = Math.max(this.place(last[1]), TOP) + 10, peakAt = this.xAt(peak.at_ns);
    return {
      text: `dashed line: reserved from CUDA, ${bytes(last[1])}`,
      places: (room) => [0, 15, 30].flatMap((lower) => [[width - room, y + lower], [peakAt - room, y + lower]]),
    };
  }
  drawCursor(g, width) {
    if (this.cursor === null) return;
    const x = this.xAt(this.cursor);
    if (x >= 0 && x <= width) this.fill(g, palette.css.accent, 1, x, TOP, 1, this.height);
  }
  // Draw a line at the peak, and return its label; null where the peak is not in sight.
  drawPeak(g, width) {
    const at = this.xAt(peak.at_ns), y = this.place(peak.bytes);
    if (!data.peak || at < 0 || at > width || alone !== null) return null;
    g.fillStyle = palette.css.ink;
    g.fillRect(at, y, 1, this.height - y);
    return { text: `peak ${bytes(peak.bytes)}`, places: (room) => [[at + 4, y + 9], [at - room, y + 9]] };
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

  // Return the allocations at a moment, from the bottom of the stack to its top.
  stackAt(t) {
    const { start, end, category, size } = allocations, alive = [];
    for (let i = 0; i < size; i++) if (start[i] <= t && end[i] > t && (alone === null || category[i] === alone)) alive.push(i);
    return alive.sort((a, b) => category[a] - category[b] || a - b);
  }
  neighbour({ row, i }, across, down) {
    if (across) return i + across >= 0 && i + across < row.size ? { row, i: i + across } : null;
    const { start, end } = allocations, t = (Math.max(start[i], this.from) + Math.min(end[i], this.to)) / 2;
    const stack = this.stackAt(Math.min(Math.max(t, start[i]), end[i] - 1)), next = stack[stack.indexOf(i) - down];
    return next === undefined ? null : { row, i: next };
  }
  entry() {
    const top = this.stackAt(Math.min(Math.max(peak.at_ns, this.from), this.to)).at(-1);
    return top === undefined ? null : { row: this.item, i: top };
  }
}

// Return the runs of columns that show the same moment, which are drawn as one; none where nothing is allocated yet.
function columnRuns(moments) {
  const runs = [];
  moments.forEach((moment, x) => {
    const last = runs.at(-1);
    if (moment >= 0 && last?.moment === moment && last.x + last.wide === x) last.wide++;
    else if (moment >= 0) runs.push({ moment, x, wide: 1 });
  });
  return runs;
}

// Draw each label, { text, places(room) }, at the first of its places that is inside the chart and free; else not at all.
function drawLabels(g, labels, width) {
  const taken = [];
  for (const { text, places } of labels) {
    const room = g.measureText(text).width + 8;
    const free = ([x, y]) => x >= 0 && x + room - 4 <= width && !taken.some((one) => Math.abs(one.y - y) < 14 && x < one.x + one.room && one.x < x + room);
    const place = places(room).find(free);
    if (!place) continue;
    const [x, y] = place;
    taken.push({ x, y, room });
    g.fillStyle = palette.css.page;
    g.globalAlpha = 0.75;
    g.fillRect(x - 2, y - 7, room - 4, 14);
    g.globalAlpha = 1;
    g.fillStyle = palette.css.ink;
    g.fillText(text, x, y);
  }
}
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

function allocationDetails(i) {
  const { start, end, bytes: given, category, one } = allocations, c = data.allocations, what = categories[category[i]];
  if (i >= one) return { heading: `${what}: ${bytes(given[i])}`, items: [["kind", "several allocations in one band"], ["from", time(start[i])], ["to", time(end[i])]] };
  const event = (number, at) => ({ text: `event ${grouped(number)}, at ${time(at)}`, does: () => showEvent(events.number.indexOf(number)) });
  return {
    heading: `${what}: ${data.names[c.name[i]] ?? bytes(given[i])}`,
    items: [
      ["size", `${bytes(given[i])} (${grouped(given[i])} B)`], ["added by rounding", c.unasked_bytes[i] && bytes(c.unasked_bytes[i])],
      ["category", { text: what, does: () => showAlone(category[i]) }],
      ["phase", data.phases[c.phase[i]]], ["layer", data.layers[c.layer[i]]],
      ["allocated", c.made[i] === null ? "before recording began" : event(c.made[i], start[i])],
      ["freed", c.freed[i] === null ? "not freed" : event(c.freed[i], end[i])],
      ["alive for", time(end[i] - start[i])], [data.when, start[i] <= peak.at_ns && end[i] > peak.at_ns ? "allocated" : "not allocated"],
    ],
    long: stackText(c.stack[i]) || "no stack was recorded",
    actions: [["zoom to it (z)", () => timeline.focus({ row: timeline.item, i })]],
  };
}
