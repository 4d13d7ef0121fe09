// The overview above a timeline: some of its rows from end to end, every hit of the search, and a frame around what is in view.
const OVERVIEW = { steps: 14, row: 6, least: 3, rows: 240, hits: 9 }; // heights in pixels; a row is lower where there are many
class Overview {
  // steps: { start, duration, number }; hits(): what the search found, a new list for each search.
  constructor(canvas, chart, rows, steps, hits) {
    const row = Math.max(OVERVIEW.least, Math.min(OVERVIEW.row, Math.floor(OVERVIEW.rows / Math.max(rows.length, 1))));
    Object.assign(this, { canvas, chart, rows, row, steps, hits, height: OVERVIEW.steps + rows.length * row + OVERVIEW.hits });
    canvas.style.height = `${this.height}px`;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
      this.moving = true;
      this.center(event);
    });
    canvas.addEventListener("pointermove", (event) => this.moving && this.center(event));
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, () => { this.moving = false; });
  }
  xAt(t) { return (t / this.chart.end) * this.canvas.clientWidth; }
  // Move the view of the timeline to the pointer, without a zoom.
  center(event) {
    const { chart, canvas } = this, half = (chart.to - chart.from) / 2;
    const at = ((event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth) * chart.end;
    chart.show(at - half, at + half);
  }
  draw() {
    const { canvas, chart } = this, width = canvas.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    const columns = Math.round(width * ratio), rows = Math.round(this.height * ratio);
    if (columns !== this.still?.width || palette.rgb !== this.rgb || this.hits() !== this.drawn) this.drawStill(columns, rows, ratio);
    if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
    const g = canvas.getContext("2d"), left = this.xAt(chart.from), wide = Math.max(this.xAt(chart.to) - left, 3);
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, columns, rows);
    g.drawImage(this.still, 0, 0);
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = palette.css.accent;
    g.globalAlpha = 0.15;
    g.fillRect(left, 0, wide, this.height);
    g.globalAlpha = 1;
    g.strokeStyle = palette.css.accent;
    g.lineWidth = 2;
    g.strokeRect(Math.min(Math.max(left, 1), width - 3), 1, Math.max(Math.min(wide, width - 1 - left) - 1, 2), this.height - 2);
  }
  // Draw what does not depend on the view.
  drawStill(columns, height, ratio) {
    Object.assign(this, { still: Object.assign(document.createElement("canvas"), { width: columns, height }), rgb: palette.rgb, drawn: this.hits() });
    const g = this.still.getContext("2d"), { chart, rows, steps } = this, width = columns / ratio;
    g.scale(ratio, ratio);
    g.font = FONT;
    g.textBaseline = "middle";
    steps.start.forEach((start, n) => {
      const left = this.xAt(start), wide = Math.max(this.xAt(start + steps.duration[n]) - left - 1, 1);
      const shade = n % 2 ? "odd" : "even", text = fitted(`step ${steps.number[n]}`, wide - 6);
      g.fillStyle = palette.css[shade];
      g.fillRect(left, 0, wide, OVERVIEW.steps - 2);
      g.fillStyle = palette.over[shade];
      if (text) g.fillText(text, left + 3, OVERVIEW.steps / 2 - 0.5);
    });
    const strip = new ImageData(columns, rows.length || 1), whole = { from: 0, to: chart.end, end: chart.end };
    const wide = rows.flatMap((row, n) => mixed(row, whole, columns, strip.data, n).map(([, i]) => [row, n, i]));
    const buffer = Object.assign(document.createElement("canvas"), { width: columns, height: strip.height });
    buffer.getContext("2d").putImageData(strip, 0, 0);
    g.imageSmoothingEnabled = false;
    const top = (n) => OVERVIEW.steps + n * this.row;
    rows.forEach((row, n) => g.drawImage(buffer, 0, n, columns, 1, 0, top(n), width, this.row - 1));
    for (const [row, n, i] of wide) {
      g.globalAlpha = row.faint?.[i] ? FAINT : 1;
      g.fillStyle = palette.css[palette.names[row.shades[i]]];
      g.fillRect(this.xAt(row.start[i]), top(n), this.xAt(row.duration[i]), this.row - 1);
    }
    g.globalAlpha = 1;
    g.fillStyle = palette.css.ink;
    const marked = new Set(this.drawn.map(({ row, i }) => Math.round(this.xAt(row.start[i] + row.duration[i] / 2))));
    for (const x of marked) g.fillRect(x - 1, this.height - OVERVIEW.hits + 1, 2, OVERVIEW.hits - 3);
  }
}
