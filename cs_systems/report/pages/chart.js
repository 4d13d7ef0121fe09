// Rows of boxes along one axis, drawn on a canvas: `new Chart(canvas, rows, end)`. chart_input.js has its pointer and keys,
// chart_mixing.js the boxes that are too narrow to be drawn.
const ROW = 18, TITLE = 22, AXIS = 20, PADDING = 6;
const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const LEAST_SPAN = 200; // of the axis across the width, at the closest

// A row: {title?, size, start, duration, shades, label(i), tip(i), details(i)?, faint?}; its boxes are in order and do not
// overlap. `faint`: 1 for each box that is drawn faintly.
class Chart {
  constructor(canvas, rows, end) {
    Object.assign(this, { canvas, end, from: 0, to: end, home: [0, end], hovered: null, pinned: null, selected: null, marked: [] });
    this.take(rows);
    new ChartInput(this);
    new ResizeObserver(() => this.redraw()).observe(canvas);
  }
  take(rows) {
    Object.assign(this, { rows, hovered: null, pinned: null, marked: [] });
    this.height = AXIS + PADDING;
    for (const row of rows) {
      if (row.title) this.height += TITLE;
      row.top = this.height;
      this.height += ROW;
    }
    this.height += PADDING;
    this.canvas.style.height = `${this.height}px`;
  }

  show(from, to) {
    const span = Math.min(Math.max(to - from, Math.min(LEAST_SPAN, this.end)), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - span);
    this.to = this.from + span;
    this.redraw();
    this.tell();
  }
  tell() {
    Object.assign(this.canvas.dataset, { from: Math.round(this.from), to: Math.round(this.to) });
    this.onShow?.(this.from, this.to);
  }
  zoom(factor, at = (this.from + this.to) / 2) {
    const span = Math.min(Math.max((this.to - this.from) * factor, Math.min(LEAST_SPAN, this.end)), this.end);
    const from = at - ((at - this.from) * span) / (this.to - this.from);
    this.show(from, from + span);
  }
  move(by) {
    const room = Math.min(Math.max(by, -this.from), this.end - this.to);
    this.show(this.from + room, this.to + room);
  }
  focus({ row, i }, around = 0.05) {
    const margin = Math.max(row.duration[i] * around, 1);
    this.show(row.start[i] - margin, row.start[i] + row.duration[i] + margin);
  }
  // Move a box into view, without a zoom.
  reveal({ row, i }) {
    const start = row.start[i], end = start + row.duration[i], span = this.to - this.from;
    if (end < this.from || start > this.to) this.show((start + end - span) / 2, (start + end + span) / 2);
  }
  whole() { this.show(...this.home); }
  timeAt(x) { return this.from + (x / this.canvas.clientWidth) * (this.to - this.from); }
  xAt(t) { return ((t - this.from) / (this.to - this.from)) * this.canvas.clientWidth; }

  // Return the box at a point of the canvas, or the nearest within three pixels.
  at(x, y) {
    const row = this.rows.find((r) => y >= r.top && y < r.top + ROW);
    return row ? nearest(row, this.timeAt(x), (3 / this.canvas.clientWidth) * (this.to - this.from)) : null;
  }
  // Return the neighbour of a box: in its row, or the nearest one of the next row that has any in view.
  neighbour({ row, i }, across, down) {
    if (across) return i + across >= 0 && i + across < row.size ? { row, i: i + across } : null;
    const middle = row.start[i] + row.duration[i] / 2;
    for (let n = this.rows.indexOf(row) + down; this.rows[n]; n += down) {
      const found = nearest(this.rows[n], Math.min(Math.max(middle, this.from), this.to), this.to - this.from);
      if (found) return found;
    }
    return null;
  }
  // Return the first box to pin by keys: that in the middle of the view, of the row with the most boxes in view.
  entry() {
    const inView = (row) => firstEnding(row, this.to) - firstEnding(row, this.from);
    const rows = this.rows.filter((row) => row.size && row.details).sort((a, b) => inView(b) - inView(a));
    return rows.length ? nearest(rows[0], (this.from + this.to) / 2, Infinity) : null;
  }
  // Pin a box, or none; `onPin` shows its details.
  pin(hit, reveal = false) {
    this.pinned = hit;
    if (hit && reveal) this.reveal(hit);
    this.redraw();
    this.onPin?.(hit);
  }
  select(from, to) {
    this.selected = from === null ? null : [Math.max(0, Math.min(from, to)), Math.min(this.end, Math.max(from, to))];
    this.redraw();
    this.onSelect?.(this.selected);
  }

  redraw() { this.asked ??= requestAnimationFrame(() => this.draw()); }
  // Return the context of the cleared canvas, in units of CSS pixels.
  begin() {
    cancelAnimationFrame(this.asked);
    this.asked = undefined;
    if (palette.rgb.length !== palette.names.length) palette.read();
    const { canvas } = this, ratio = devicePixelRatio || 1, g = canvas.getContext("2d");
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(this.height * ratio);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, canvas.clientWidth, this.height);
    g.font = FONT;
    g.textBaseline = "middle";
    return g;
  }
  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const g = this.begin();
    this.drawAxis(g, width);
    this.drawBoxes(g, width);
    this.drawSelection(g, width);
    for (const row of this.rows) {
      if (!row.title) continue;
      g.fillStyle = palette.css.soft;
      g.fillText(row.title, 6, row.top - TITLE / 2 + 2, width - 12);
    }
    this.onDraw?.(g, width);
    for (const hit of this.marked) this.outline(g, hit, 1.5);
    if (this.hovered) this.outline(g, this.hovered, 1);
    if (this.pinned) this.outline(g, this.pinned, 2.5);
  }
  outline(g, { row, i }, thickness) {
    const left = this.xAt(row.start[i]), width = Math.max(this.xAt(row.start[i] + row.duration[i]) - left, thickness + 1);
    g.lineWidth = thickness;
    g.strokeStyle = palette.css.ink;
    g.strokeRect(left - 0.5, row.top - 0.5, width, ROW);
  }
  unit() { return this.to >= 1e10 ? [1e9, "s"] : this.to >= 1e6 ? [1e6, "ms"] : [1e3, "µs"]; } // of the axis: [size, name]
  drawAxis(g, width) {
    const [unit, name] = this.unit();
    const most = Math.max(2, Math.floor(width / 90)), raw = (this.to - this.from) / unit / most;
    const power = 10 ** Math.floor(Math.log10(raw)), round = power * [1, 2, 5, 10].find((n) => n * power >= raw);
    const step = round * unit, places = Math.max(0, -Math.floor(Math.log10(round) + 1e-9));
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = this.xAt(t);
      g.fillStyle = palette.css.line;
      g.fillRect(x, 0, 1, this.height);
      const text = `${(t / unit).toFixed(places)} ${name}`;
      g.fillStyle = palette.css.soft;
      if (x + 4 + g.measureText(text).width <= width) g.fillText(text, x + 4, AXIS / 2 + 1);
    }
  }
  drawSelection(g, width) {
    if (!this.selected) return;
    const [left, right] = this.selected.map((t) => this.xAt(t));
    g.fillStyle = palette.css.accent;
    g.globalAlpha = 0.14;
    g.fillRect(left, 0, Math.max(right - left, 1), this.height);
    g.globalAlpha = 1;
    for (const x of [left, right]) if (x >= 0 && x <= width) g.fillRect(x - 0.5, 0, 1.5, this.height);
  }
  // Draw the wide boxes one by one. The narrow ones of each pixel are mixed in `strip`, which has a line for each row.
  drawBoxes(g, width) {
    const columns = this.canvas.width, strip = new ImageData(columns, Math.max(this.rows.length, 1)), wide = [];
    this.rows.forEach((row, n) => wide.push(...mixed(row, this, columns, strip.data, n)));
    const buffer = (this.buffer ??= document.createElement("canvas"));
    if (buffer.width !== strip.width || buffer.height !== strip.height) Object.assign(buffer, { width: strip.width, height: strip.height });
    buffer.getContext("2d").putImageData(strip, 0, 0);
    g.imageSmoothingEnabled = false;
    this.rows.forEach((row, n) => g.drawImage(buffer, 0, n, columns, 1, 0, row.top, width, ROW - 1));
    for (const [row, i] of wide) this.drawBox(g, row, i, width);
  }
  drawBox(g, row, i, width) {
    const height = ROW - 1, name = palette.names[row.shades[i]];
    const left = Math.max(this.xAt(row.start[i]), -1), right = Math.min(this.xAt(row.start[i] + row.duration[i]), width + 1);
    const wide = Math.max(right - left - 1, 1);
    g.globalAlpha = row.faint?.[i] ? FAINT : 1;
    g.fillStyle = palette.css[name];
    g.fillRect(left, row.top, wide, height);
    if (HATCHES[name]) hatch(g, left, row.top, wide, height, HATCHES[name]);
    if (wide > 22) {
      const x = Math.max(left, 0) + 4, room = Math.min(right, width) - x - 4, text = fitted(row.label(i), room);
      g.fillStyle = row.faint?.[i] ? palette.css.ink : palette.over[name];
      g.globalAlpha = row.faint?.[i] ? 0.45 : 1;
      if (text) g.fillText(text, x, row.top + height / 2 + 0.5, room);
    }
    g.globalAlpha = 1;
  }
}

// Return the first box of the row that ends after t. The boxes are in order, so their ends are too.
function firstEnding(row, t) {
  let low = 0, high = row.size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.start[middle] + row.duration[middle] > t) high = middle;
    else low = middle + 1;
  }
  return low;
}
// Return the row's box nearest to t, if one is within reach.
function nearest(row, t, reach) {
  const next = firstEnding(row, t), away = (i) => Math.max(row.start[i] - t, t - row.start[i] - row.duration[i], 0);
  const near = [next - 1, next].filter((i) => i >= 0 && i < row.size).sort((a, b) => away(a) - away(b))[0];
  return near !== undefined && away(near) <= reach ? { row, i: near } : null;
}

const letter = (() => {
  const g = document.createElement("canvas").getContext("2d");
  g.font = FONT;
  return g.measureText("abcdefghijklmnopqrstuvwxyz_0123456789").width / 37;
})();
function fitted(text, room) {
  const most = Math.floor(room / letter);
  return text.length <= most ? text : most < 4 ? "" : `${text.slice(0, most - 1)}…`;
}
function hatch(g, left, top, width, height, slope) {
  g.save();
  g.beginPath();
  g.rect(left, top, width, height);
  g.clip();
  g.lineWidth = 1;
  g.strokeStyle = palette.css.hatch;
  g.beginPath();
  for (let x = left - height - ((left - height) % 7); x < left + width; x += 7) {
    g.moveTo(x, slope > 0 ? top + height : top);
    g.lineTo(x + height, slope > 0 ? top : top + height);
  }
  g.stroke();
  g.restore();
}
