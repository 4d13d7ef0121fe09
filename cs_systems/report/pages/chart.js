// Boxes in rows along one axis, drawn on a canvas: `new Chart(canvas, rows, end)`.
const ROW = 18, TITLE = 22, AXIS = 20, PADDING = 6;
const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const LEAST_SPAN = 200; // of the axis across the width, at the closest
const HATCHES = { unattributed: 1, other: -1, outside: -1 }; // names whose boxes are hatched, and the slope of the lines
let colors = {}, over = {}; // name → CSS colour; name → colour of text on it

function readColors(names) {
  const style = getComputedStyle(document.documentElement);
  const used = [...names, ...Object.keys(HATCHES), "hatch", "ink", "soft", "line", "page"];
  colors = Object.fromEntries(used.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  over = Object.fromEntries(used.map((name) => [name, HATCHES[name] ? colors.ink : textOn(colors[name])]));
}
// Return black or white, the one that has more contrast to the colour, `#rrggbb`.
function textOn(color) {
  const light = (at) => {
    const value = parseInt(color.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  return 0.2126 * light(1) + 0.7152 * light(3) + 0.0722 * light(5) > 0.179 ? "#000000" : "#ffffff";
}

// Lanes of boxes along one axis, with zooming, panning and tooltips.
// A row: {title?, start, duration, size, color(i), label(i), tip(i), faint?(i)}; its boxes are in order and do not overlap.
class Chart {
  constructor(canvas, rows, end) {
    Object.assign(this, { canvas, rows, end, from: 0, to: end, hovered: null, pointers: new Map(), moved: 0 });
    this.height = AXIS + PADDING;
    for (const row of rows) {
      if (row.title) this.height += TITLE;
      row.top = this.height;
      this.height += ROW;
    }
    this.height += PADDING;
    canvas.style.height = `${this.height}px`;
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(canvas);
    this.draw();
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
  whole() { this.show(0, this.end); }
  timeAt(x) { return this.from + (x / this.canvas.clientWidth) * (this.to - this.from); }

  // Return the box at a point of the canvas, or the nearest within three pixels.
  at(x, y) {
    const row = this.rows.find((r) => y >= r.top && y < r.top + ROW);
    if (!row) return null;
    const t = this.timeAt(x), reach = (3 / this.canvas.clientWidth) * (this.to - this.from);
    const next = firstEnding(row, t);
    const near = [next - 1, next].filter((i) => i >= 0 && i < row.size).map((i) => {
      return [Math.max(row.start[i] - t, t - row.start[i] - row.duration[i], 0), i];
    }).sort((a, b) => a[0] - b[0])[0];
    return near && near[0] <= reach ? { row, i: near[1] } : null;
  }

  redraw() { this.asked ??= requestAnimationFrame(() => this.draw()); }
  draw() {
    this.asked = undefined;
    const { canvas } = this, width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(this.height * ratio);
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.font = FONT;
    g.textBaseline = "middle";
    this.drawAxis(g, width);
    for (const row of this.rows) {
      if (row.title) {
        g.fillStyle = colors.soft;
        g.fillText(row.title, 6, row.top - TITLE / 2 + 2, width - 12);
      }
      this.drawRow(g, row, width);
    }
    if (this.hovered) {
      const { row, i } = this.hovered, scale = width / (this.to - this.from);
      g.strokeStyle = colors.ink;
      g.strokeRect((row.start[i] - this.from) * scale, row.top + 0.5, Math.max(row.duration[i] * scale, 1), ROW - 2);
    }
  }
  unit() { return this.to >= 1e6 ? [1e6, "ms"] : [1e3, "µs"]; } // of the axis: [size, name]
  drawAxis(g, width) {
    const [unit, name] = this.unit();
    const most = Math.max(2, Math.floor(width / 90)), raw = (this.to - this.from) / unit / most;
    const power = 10 ** Math.floor(Math.log10(raw)), round = power * [1, 2, 5, 10].find((n) => n * power >= raw);
    const step = round * unit, places = Math.max(0, -Math.floor(Math.log10(round) + 1e-9));
    for (let t = Math.ceil(this.from / step) * step; t <= this.to; t += step) {
      const x = ((t - this.from) / (this.to - this.from)) * width;
      g.fillStyle = colors.line;
      g.fillRect(x, 0, 1, this.height);
      const text = `${(t / unit).toFixed(places)} ${name}`;
      g.fillStyle = colors.soft;
      if (x + 4 + g.measureText(text).width <= width) g.fillText(text, x + 4, AXIS / 2 + 1);
    }
  }
  drawRow(g, row, width) {
    const scale = width / (this.to - this.from), height = ROW - 1;
    for (let i = firstEnding(row, this.from); i < row.size && row.start[i] < this.to; i++) {
      const left = Math.max((row.start[i] - this.from) * scale, -1);
      const right = Math.min((row.start[i] + row.duration[i] - this.from) * scale, width + 1);
      // A box narrower than a pixel is drawn fainter, not wider, so that a busy GPU and an idle one look different.
      const wide = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.3);
      const color = row.color(i);
      g.globalAlpha = row.faint?.(i) ? 0.15 : 1;
      g.fillStyle = colors[color];
      g.fillRect(left, row.top, wide, height);
      if (HATCHES[color] && wide > 3) hatch(g, left, row.top, wide, height, HATCHES[color]);
      if (wide > 22) {
        const x = Math.max(left, 0) + 4, room = Math.min(right, width) - x - 4;
        const text = fitted(row.label(i), room);
        g.fillStyle = over[color];
        if (text) g.fillText(text, x, row.top + height / 2 + 0.5, room);
      }
    }
    g.globalAlpha = 1;
  }

  listen() {
    const { canvas } = this, place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      const by = (sideways ? event.deltaX || event.deltaY : event.deltaY) * (event.deltaMode === 1 ? 16 : 1);
      if (!sideways && by > 0 && this.to - this.from >= this.end) return; // all is visible: let the page scroll
      event.preventDefault();
      if (sideways) this.move((by / canvas.clientWidth) * (this.to - this.from));
      else this.zoom(Math.exp(by * 0.002), this.timeAt(place(event)[0]));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, place(event));
      this.moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const was = this.pointers.get(event.pointerId), now = place(event);
      if (!was) return this.hover(event, this.at(...now));
      if (this.pointers.size === 2) this.pinch(event.pointerId, now);
      else this.drag(was, now);
      this.pointers.set(event.pointerId, now);
    });
    const release = (event) => {
      this.pointers.delete(event.pointerId);
      canvas.classList.remove("held");
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => this.hover(null, null));
    canvas.addEventListener("click", (event) => { if (this.moved < 4) this.hover(event, this.at(...place(event))); });
    canvas.addEventListener("dblclick", (event) => {
      const hit = this.at(...place(event));
      hit ? this.focus(hit) : this.whole();
    });
    canvas.addEventListener("keydown", (event) => {
      const span = this.to - this.from, does = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.whole(),
        ArrowLeft: () => this.move(-span / 8), ArrowRight: () => this.move(span / 8), Escape: () => this.hover(null, null),
      }[event.key];
      if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      does();
    });
  }
  drag(was, now) {
    this.moved += Math.abs(now[0] - was[0]) + Math.abs(now[1] - was[1]);
    if (this.moved < 4) return;
    this.canvas.classList.add("held");
    this.hover(null, null);
    this.move(((was[0] - now[0]) / this.canvas.clientWidth) * (this.to - this.from));
  }
  pinch(moving, now) {
    this.moved = Infinity;
    const [still] = [...this.pointers].filter(([id]) => id !== moving).map(([, at]) => at);
    const was = this.pointers.get(moving), apart = Math.max(Math.abs(now[0] - still[0]), 10);
    this.zoom(Math.max(Math.abs(was[0] - still[0]), 10) / apart, this.timeAt(still[0]));
  }
  hover(event, hit) {
    if (hit?.row !== this.hovered?.row || hit?.i !== this.hovered?.i) {
      this.hovered = hit;
      this.redraw();
      tip.fill(hit);
    }
    if (hit) tip.place(event.clientX, event.clientY);
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
  g.strokeStyle = colors.hatch;
  g.beginPath();
  for (let x = left - height - ((left - height) % 7); x < left + width; x += 7) {
    g.moveTo(x, slope > 0 ? top + height : top);
    g.lineTo(x + height, slope > 0 ? top : top + height);
  }
  g.stroke();
  g.restore();
}

const tip = {
  box: document.getElementById("tip"),
  fill(hit) {
    this.box.hidden = !hit;
    if (!hit) return;
    const [head, ...lines] = hit.row.tip(hit.i).filter(Boolean);
    const bold = document.createElement("b");
    bold.textContent = head;
    this.box.replaceChildren(bold, ...lines.map((line) => {
      const span = document.createElement("span");
      span.textContent = line.full ?? line;
      if (line.full) span.className = "full";
      return span;
    }));
  },
  place(x, y) {
    const { offsetWidth: width, offsetHeight: height } = this.box;
    this.box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.box.style.top = `${y + 18 + height < innerHeight ? y + 18 : Math.max(8, y - height - 12)}px`;
  },
};
