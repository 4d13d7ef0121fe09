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
    this.drawStacks(g, width);
    this.drawAxis(g, width);
    this.drawBytes(g, width);
    this.drawBands(g, width);
    this.drawReserved(g, width);
    this.drawPeak(g, width);
    this.drawCursor(g, width);
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
      g.fillStyle = palette.css[slug(categories[c])];
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
      g.fillStyle = palette.css.line;
      g.globalAlpha = 0.6;
      g.fillRect(0, y, width, 1);
      g.globalAlpha = 1;
      label(g, `${Number(amount.toPrecision(6))} ${name}`, 4, y - 7, width);
    }
  }
  // Draw lines between allocations if few are in view, and shade the pinned one, the one under the pointer and those found.
  drawBands(g, width) {
    const { start, end, bytes: given, category, size } = allocations, seen = [];
    for (let i = 0; i < size && seen.length <= MOST_BANDS; i++) if (start[i] < this.to && end[i] > this.from) seen.push(i);
    const lines = seen.length <= MOST_BANDS, shaded = new Map(found.hits.slice(0, MOST_BANDS).map((i) => [i, 0.3]));
    if (this.hovered) shaded.set(this.hovered.i, 0.35);
    if (this.pinned) shaded.set(this.pinned.i, 0.65);
    if (!lines && !shaded.size) return;
    const kinds = new Set([...shaded.keys()].map((i) => category[i])), scale = (this.height - TOP - BOTTOM) / this.highest;
    const of = lines ? seen : Array.from({ length: size }, (_, i) => i).filter((i) => kinds.has(category[i]) && start[i] < this.to && end[i] > this.from);
    for (let x = 0; x < width; x++) {
      const moment = this.moments[x];
      if (moment < 0) continue;
      const t = levels.at[moment], heights = {};
      for (const i of of) {
        if (start[i] > t || end[i] <= t || (alone !== null && category[i] !== alone)) continue;
        const c = category[i], below = (heights[c] ??= this.below(moment, c));
        heights[c] += given[i];
        const top = this.place(below + given[i]), height = given[i] * scale, opacity = shaded.get(i);
        if (lines && height >= 3) this.fill(g, palette.over[slug(categories[c])], 0.25, x, Math.round(top), 1);
        if (opacity) this.fill(g, palette.css.ink, opacity, x, top, Math.max(height, 1));
      }
    }
  }
  fill(g, color, opacity, x, top, height) {
    g.fillStyle = color;
    g.globalAlpha = opacity;
    g.fillRect(x, top, 1, height);
    g.globalAlpha = 1;
  }
  drawReserved(g, width) {
    if (!this.highest || data.reserved.every(([, reserved]) => !reserved)) return;
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
    const text = `dashed line: reserved from CUDA, ${bytes(last[1])}`, room = g.measureText(text).width + 8;
    const y = Math.max(this.place(last[1]), TOP) + 10, peakLabel = this.peakLabel(g, width);
    const overlaps = peakLabel && Math.abs(peakLabel.y - y) < 12 && peakLabel.x + peakLabel.room > width - room;
    label(g, text, (overlaps ? peakLabel.x - 8 : width) - room, y, width);
  }
  drawCursor(g, width) {
    if (this.cursor === null) return;
    const x = this.xAt(this.cursor);
    if (x >= 0 && x <= width) this.fill(g, palette.css.accent, 1, x, TOP, this.height);
  }
  // Return the text and the place of the peak's label; null where the peak is not in sight.
  peakLabel(g, width) {
    const at = ((peak.at_ns - this.from) / (this.to - this.from)) * width;
    if (!data.events || at < 0 || at > width || alone !== null) return null;
    const text = `peak ${bytes(peak.bytes)}`, room = g.measureText(text).width + 8;
    return { text, at, x: at + room < width ? at + 4 : at - room, y: this.place(peak.bytes) + 9, room };
  }
  drawPeak(g, width) {
    const found = this.peakLabel(g, width);
    if (!found) return;
    const y = this.place(peak.bytes);
    g.fillStyle = palette.css.ink;
    g.fillRect(found.at, y, 1, this.height - y);
    label(g, found.text, found.x, found.y, width);
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

function label(g, text, x, y, width) {
  g.fillStyle = palette.css.page;
  g.globalAlpha = 0.75;
  g.fillRect(x - 2, y - 7, g.measureText(text).width + 4, 14);
  g.globalAlpha = 1;
  g.fillStyle = palette.css.ink;
  g.fillText(text, x, y, width);
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
      ["alive for", time(end[i] - start[i])], [data.events ? "at the peak" : "at the end", start[i] <= peak.at_ns && end[i] > peak.at_ns ? "allocated" : "not allocated"],
    ],
    long: stackText(c.stack[i]) || "no stack was recorded",
    actions: [["zoom to it (z)", () => timeline.focus({ row: timeline.item, i })]],
  };
}
