// The pointer and the keys of a chart: hover, drag, wheel and pinch; click or Enter pins a box, and arrows move from it.
class ChartInput {
  constructor(chart) {
    Object.assign(this, { chart, canvas: chart.canvas, pointers: new Map(), moved: 0, selecting: null });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("pointermove", (event) => this.movePointer(event));
    for (const kind of ["pointerup", "pointercancel"]) this.canvas.addEventListener(kind, (event) => this.release(event));
    this.canvas.addEventListener("pointerleave", () => this.hover(null, null));
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("dblclick", (event) => {
      const hit = chart.at(...this.place(event));
      hit ? chart.focus(hit) : chart.whole();
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => tip.fill(null));
  }
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
  get span() { return this.chart.to - this.chart.from; }

  wheel(event) {
    const { chart, canvas } = this;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    const by = (sideways ? event.deltaX || event.deltaY : event.deltaY) * (event.deltaMode === 1 ? 16 : 1);
    if (!sideways && !event.ctrlKey && !event.metaKey) return; // the page scrolls; a pinch on a touchpad comes with Ctrl
    event.preventDefault();
    if (sideways) chart.move((by / canvas.clientWidth) * this.span);
    else chart.zoom(Math.exp(by * 0.002), chart.timeAt(this.place(event)[0]));
  }
  // A drag with Shift, or along the axis, selects a range; any other moves the view.
  press(event) {
    if (event.button) return;
    if (event.isTrusted) this.canvas.setPointerCapture(event.pointerId);
    const at = this.place(event);
    this.pointers.set(event.pointerId, at);
    this.moved = 0;
    this.selecting = this.chart.onSelect && (event.shiftKey || at[1] < AXIS) ? this.chart.timeAt(at[0]) : null;
  }
  movePointer(event) {
    const was = this.pointers.get(event.pointerId), now = this.place(event);
    this.canvas.classList.toggle("selects", Boolean(this.chart.onSelect) && (event.shiftKey || now[1] < AXIS));
    if (!was) return this.hover(event, this.chart.at(...now));
    if (this.pointers.size === 2) this.pinch(event.pointerId, now);
    else this.drag(was, now);
    this.pointers.set(event.pointerId, now);
  }
  release(event) {
    this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("held");
  }
  drag(was, now) {
    this.moved += Math.abs(now[0] - was[0]) + Math.abs(now[1] - was[1]);
    if (this.moved < 4) return;
    this.hover(null, null);
    if (this.selecting !== null) return this.chart.select(this.selecting, this.chart.timeAt(now[0]));
    this.canvas.classList.add("held");
    this.chart.move(((was[0] - now[0]) / this.canvas.clientWidth) * this.span);
  }
  pinch(moving, now) {
    this.moved = Infinity;
    const [still] = [...this.pointers].filter(([id]) => id !== moving).map(([, at]) => at);
    const was = this.pointers.get(moving), apart = Math.max(Math.abs(now[0] - still[0]), 10);
    this.chart.zoom(Math.max(Math.abs(was[0] - still[0]), 10) / apart, this.chart.timeAt(still[0]));
  }
  click(event) {
    if (this.moved >= 4) return;
    const hit = this.chart.at(...this.place(event));
    this.hover(event, hit);
    this.chart.pin(hit);
  }
  hover(event, hit) {
    const { chart } = this;
    if (hit?.row !== chart.hovered?.row || hit?.i !== chart.hovered?.i) {
      chart.hovered = hit;
      chart.redraw();
      tip.fill(hit && hit.row.tip(hit.i));
    }
    if (hit) tip.place(event.clientX, event.clientY);
  }

  key(event) {
    const { chart } = this, { span } = this, { pinned } = chart;
    const arrow = (across, down) => () => {
      if (pinned) {
        const next = chart.neighbour(pinned, across, down);
        if (next) chart.pin(next, true);
      } else if (across) chart.move((across * span) / 8);
      else return false;
    };
    const does = {
      "+": () => chart.zoom(0.5), "=": () => chart.zoom(0.5), w: () => chart.zoom(0.5),
      "-": () => chart.zoom(2), s: () => chart.zoom(2), 0: () => chart.whole(),
      a: () => chart.move(-span / 8), d: () => chart.move(span / 8),
      ArrowLeft: arrow(-1, 0), ArrowRight: arrow(1, 0), ArrowUp: arrow(0, -1), ArrowDown: arrow(0, 1),
      Enter: () => chart.pin(pinned ?? chart.entry(), true),
      z: () => pinned ? chart.focus(pinned) : chart.selected && chart.show(...chart.selected),
      r: () => chart.onSelect && (pinned ? chart.select(pinned.row.start[pinned.i], pinned.row.start[pinned.i] + pinned.row.duration[pinned.i]) : chart.select(chart.from, chart.to)),
      Escape: () => {
        this.hover(null, null);
        if (pinned) chart.pin(null);
        else if (chart.selected) chart.select(null);
        else chart.onEscape?.();
      },
      ...chart.keys,
    }[event.key];
    if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
    if (does() !== false) event.preventDefault();
  }
}
