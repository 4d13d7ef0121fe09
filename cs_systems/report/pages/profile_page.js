// The page of a profile: the timeline, the icicle, and what links them with each other and with the tables.
const timeline = new Chart(byId("timeline"), [...stepRows(), ...deviceRows(), ...hostRows()], data.end_ns);
let icicle = null, icicleBy = "phase";
const charts = () => [timeline, icicle].filter(Boolean);

timeline.onShow = (from, to) => { byId("shown").textContent = `${time(from)} … ${time(to)} of ${time(data.end_ns)} recorded.`; };
timeline.onSelect = showSelection;
const MOST_IN_OVERVIEW = 8; // rows
const drawnSmall = (() => {
  const kernels = timeline.rows.filter((row) => row.say.kernel);
  return (kernels.length ? kernels : timeline.rows.slice(1)).slice(0, MOST_IN_OVERVIEW);
})();
const overview = new Overview(byId("overview"), timeline, drawnSmall, stepColumns, () => asked.hits);
timeline.onDraw = (g) => {
  drawArrows(g);
  overview.draw();
};
timeline.keys = { l: followLaunch, n: () => nextHit(), N: () => nextHit(-1), ",": () => moveStep(-1), ".": () => moveStep(1) };
timeline.onEscape = () => {
  byId("search").value = "";
  asked.words = [];
  ask({});
};
timeline.onPin = (hit) => {
  details.show("pinned", hit && hit.row.details(hit.i), true);
  const kernel = hit?.row.say.kernel?.(hit.row.items[hit.i]);
  if (icicle) {
    Object.assign(icicle, { pinned: null, marked: kernel && paths[icicleBy] ? boxesOf(icicle, icicleBy, ...kernel) : [] });
    icicle.redraw();
  }
  markRows(kernel);
  if (hit) details.uncover(timeline.canvas, hit.row.top, kernel && launchHit(...kernel)?.row.top);
};
// Mark the rows of the tables that a kernel counts in.
function markRows(kernel) {
  for (const row of document.querySelectorAll("tr.pinned")) row.classList.remove("pinned");
  if (kernel) for (const field of ["kernel", "layer"]) tableRow(field, valueOf[field](...kernel))?.classList?.add("pinned");
}

// Show one step, or with null all: in the timeline, the icicle and the sums.
function chooseStep(index) {
  chosen.step = index;
  byId("step").value = index === null ? "all" : String(index);
  const [first, last] = [stepsChosen()[0], stepsChosen().at(-1)];
  timeline.home = [first.start_ns, last.end_ns];
  timeline.whole();
  legend();
  drawIcicle();
  update();
}
function moveStep(by) {
  const next = (chosen.step ?? 0) + by;
  if (steps[next]) chooseStep(next);
}
function drawIcicle() {
  if (!byId("icicle")) return; // a trace of a CPU has none
  const rows = icicleRows(icicleBy), whole = Math.max(rows[0].duration[0], 1);
  icicle ??= Object.assign(new Chart(byId("icicle"), [], whole), {
    onPin: (hit) => {
      const path = hit ? lineage(hit.row.boxes[hit.i]) : [];
      timeline.pinned = null;
      details.show("pinned", hit && hit.row.details(hit.i), true);
      if (icicleBy in trees) {
        byId("search").value = path.length > 1 ? path.at(-1).value : ""; // the host's items are found by their names
        search();
      } else ask(Object.fromEntries(path.map((box) => [box.field, box.value]))); // of modules, the innermost counts
      if (hit) details.uncover(icicle.canvas, hit.row.top);
    },
  });
  Object.assign(icicle, { end: whole, home: [0, whole] });
  icicle.take(rows);
  icicle.whole();
}

function steppers() {
  const choices = steps.map((step, i) => new Option(`step ${step.number} · ${time(step.wall_ns)}${i === median ? " · median" : ""}`, String(i)));
  if (steps.length > 1) choices.push(new Option(`all ${steps.length} steps`, "all"));
  byId("step").replaceChildren(...choices);
  byId("step").addEventListener("change", (event) => chooseStep(event.target.value === "all" ? null : Number(event.target.value)));
}
controls(timeline, search, nextHit);
byId("select").addEventListener("click", () => timeline.select(timeline.from, timeline.to));
byId("details-close").addEventListener("click", () => {
  for (const chart of charts()) if (chart.pinned) chart.pin(null);
  timeline.select(null);
  timeline.canvas.focus();
});
for (const one of document.querySelectorAll("input[name=by]")) {
  one.addEventListener("change", () => {
    icicleBy = one.value;
    drawIcicle();
  });
}
steppers();
chooseStep(median);
linkTables();
drawAnewOnChange(charts);
for (const chart of charts()) chart.draw();
Object.assign(document.documentElement.dataset, {
  buildMs: (performance.now() - started).toFixed(1), // reading the data, building the rows, the first drawing
  readyMs: performance.now().toFixed(1), // since the browser began to open the page
});
