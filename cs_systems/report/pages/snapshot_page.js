// The page of a memory snapshot: the timeline, its history by event, the segments, and what links them.
const timeline = new MemoryChart(byId("timeline"));
const rows = segmentRows();
const segments = new BytesChart(byId("segments"), rows, Math.max(1, ...rows.map((row) => row.start.at(-1) + row.duration.at(-1))));
const charts = [timeline, segments];
timeline.onShow = (from, to) => { byId("shown").textContent = `${time(from)} … ${time(to)}.`; };
timeline.keys = { n: () => nextHit(), N: () => nextHit(-1), p: toPeak, ",": () => showEvent(current - 1), ".": () => showEvent(current + 1) };
for (const chart of charts) {
  chart.onPin = (hit) => {
    for (const other of charts) if (hit && other !== chart && other.pinned) other.pin(null);
    details.show("pinned", hit && hit.row.details(hit.i), true);
    if (hit) details.uncover(chart.canvas, hit.row.top ?? chart.canvas.clientHeight / 2);
  };
}

// Show a category alone, or with null all.
function showAlone(category) {
  alone = alone === category ? null : category;
  [...byId("categories").children].forEach((other, n) => other.setAttribute("aria-pressed", String(n === alone)));
  timeline.hovered = null;
  tip.fill(null);
  timeline.redraw();
}
function legend() {
  byId("categories").append(...categories.map((category, c) => {
    const made = button("", () => showAlone(c));
    made.setAttribute("aria-pressed", "false");
    made.append(swatch(slug(category)), category, element("small", bytes(peak.by[c])));
    return made;
  }));
}
function linkTables() {
  for (const head of document.querySelectorAll("main th[data-column=category]")) {
    for (const row of head.closest("table").tBodies[0].rows) {
      const cell = row.cells[head.cellIndex], category = categories.indexOf(cell.textContent);
      if (category < 0) continue;
      const made = button(cell.textContent, () => showAlone(category));
      made.className = "link";
      cell.replaceChildren(made);
    }
  }
}
function toPeak() {
  timeline.show(peak.at_ns - timeline.end / 100, peak.at_ns + timeline.end / 100);
}
controls(timeline, search, nextHit);
byId("to-peak").addEventListener("click", toPeak);
byId("details-close").addEventListener("click", () => {
  for (const chart of charts) chart.pin(null);
  timeline.canvas.focus();
});
for (const chart of charts) chart.tell();
legend();
linkTables();
startHistory();
drawAnewOnChange(() => charts);
for (const chart of charts) chart.draw();
Object.assign(document.documentElement.dataset, {
  buildMs: (performance.now() - started).toFixed(1), // reading the data, the levels, the first drawing
  readyMs: performance.now().toFixed(1), // since the browser began to open the page
});
