// The history: the events that allocate or free memory around one of them, and the search for allocations.
const EVENTS_SHOWN = 15;
let current = 0; // index in `events`
function showEvent(index) {
  if (!events.size) return;
  current = Math.min(Math.max(index, 0), events.size - 1);
  const first = Math.max(0, Math.min(current - (EVENTS_SHOWN >> 1), events.size - EVENTS_SHOWN));
  byId("event").value = String(current);
  byId("event").setAttribute("aria-valuetext", eventText(current));
  byId("events").tBodies[0].replaceChildren(...Array.from({ length: Math.min(EVENTS_SHOWN, events.size) }, (_, n) => eventRow(first + n)));
  const at = (timeline.cursor = events.time(current));
  if (at < timeline.from || at > timeline.to) timeline.move(at - (timeline.from + timeline.to) / 2);
  timeline.redraw();
}
function eventText(index) {
  return `event ${grouped(events.number[index])}: ${events.allocates(index) ? "allocates" : "frees"} ${bytes(allocations.bytes[events.allocation(index)])}`;
}
function eventRow(index) {
  const c = data.allocations, i = events.allocation(index), t = events.time(index), category = categories[allocations.category[i]];
  const pin = button(grouped(events.number[index]), () => {
    showEvent(index);
    timeline.pin({ row: timeline.item, i }, true);
  });
  pin.className = "link";
  const row = element("tr", [element("td", pin, "number"), element("td", time(t), "number"), element("td", events.allocates(index) ? "allocate" : "free"),
    element("td", bytes(allocations.bytes[i]), "number"), element("td", [swatch(slug(category)), category]),
    element("td", data.names[c.name[i]] ?? data.layers[c.layer[i]] ?? ""),
    element("td", bytes(levels.total[lastBefore(levels.at, levels.size, t)] ?? 0), "number")]);
  if (index === current) row.setAttribute("aria-current", "true");
  return row;
}
function startHistory() {
  if (!events.size) return void byId("event")?.closest("section").remove();
  byId("event").max = String(events.size - 1);
  byId("event").addEventListener("input", () => showEvent(Number(byId("event").value)));
  let atPeak = events.size - 1;
  while (atPeak > 0 && events.time(atPeak) > peak.at_ns) atPeak -= 1;
  showEvent(atPeak);
  timeline.cursor = null; // until one is chosen
}

// Search categories, names, layers, phases and stacks: each word must be in one of them.
const found = { hits: [], at: -1 };
function search() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean), c = data.allocations;
  const stacks = data.stacks.map((_, n) => stackText(n));
  const columns = [[categories, allocations.category], [data.names, c.name], [data.layers, c.layer], [data.phases, c.phase], [stacks, c.stack]];
  const having = words.map((word) => columns.map(([texts]) => texts.map((text) => text?.toLowerCase().includes(word) ?? false)));
  const fits = (i) => having.every((of) => columns.some(([, column], n) => of[n][column[i]]));
  found.hits = words.length ? Array.from({ length: allocations.one }, (_, i) => i).filter(fits) : [];
  found.at = -1;
  const alive = found.hits.filter((i) => allocations.start[i] <= peak.at_ns && allocations.end[i] > peak.at_ns);
  const sum = bytes(alive.reduce((total, i) => total + allocations.bytes[i], 0));
  byId("found").textContent = words.length ? `${count(found.hits.length, "allocation")}; ${data.when} ${grouped(alive.length)} of them, ${sum}` : "";
  timeline.redraw();
}
function nextHit(way = 1) {
  if (!found.hits.length) return;
  found.at = found.at < 0 && way < 0 ? found.hits.length - 1 : (found.at + way + found.hits.length) % found.hits.length;
  timeline.pin({ row: timeline.item, i: found.hits[found.at] }, true);
}
