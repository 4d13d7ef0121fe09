// The history: the events that allocate or free memory around one of them, and the search for allocations.
const EVENTS_SHOWN = 15;
let current = 0; // index in `events`
function showEvent(index) {
  if (!events.length) return;
  current = Math.min(Math.max(index, 0), events.length - 1);
  const at = eventTime(events[current]), from = Math.max(0, Math.min(current - (EVENTS_SHOWN >> 1), events.length - EVENTS_SHOWN));
  byId("event").value = String(current);
  byId("event").setAttribute("aria-valuetext", eventText(current));
  byId("events").tBodies[0].replaceChildren(...events.slice(from, from + EVENTS_SHOWN).map((event, n) => eventRow(event, from + n)));
  timeline.cursor = at;
  if (at < timeline.from || at > timeline.to) timeline.move(at - (timeline.from + timeline.to) / 2);
  timeline.redraw();
}
const eventText = (index) => `event ${grouped(events[index][0])}: ${events[index][2] ? "allocates" : "frees"} ${bytes(allocations.bytes[events[index][1]])}`;
function eventRow([number, i, made], index) {
  const c = data.allocations, t = eventTime([number, i, made]), after = levels.total[lastBefore(levels.at, levels.size, t)] ?? 0;
  const pin = button(grouped(number), () => {
    showEvent(index);
    timeline.pin({ row: timeline.item, i }, true);
  });
  pin.className = "link";
  const swatch = element("i", []);
  swatch.style.background = `var(--${slug(categories[allocations.category[i]])})`;
  const row = element("tr", [element("td", pin, "number"), element("td", time(t), "number"), element("td", made ? "allocate" : "free"),
    element("td", bytes(allocations.bytes[i]), "number"), element("td", [swatch, categories[allocations.category[i]]]),
    element("td", data.names[c.name[i]] ?? data.layers[c.layer[i]] ?? ""), element("td", bytes(after), "number")]);
  if (index === current) row.setAttribute("aria-current", "true");
  return row;
}
function startHistory() {
  if (!events.length) return void byId("event")?.closest("section").remove();
  byId("event").max = String(events.length - 1);
  byId("event").addEventListener("input", () => showEvent(Number(byId("event").value)));
  showEvent(events.findLastIndex((event) => eventTime(event) <= peak.at_ns));
  timeline.cursor = null; // until one is chosen
}

// Search names, layers, phases, categories and stacks.
const found = { hits: [], at: -1 };
function search() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean), c = data.allocations, stacks = new Map();
  const stack = (n) => stacks.get(n) ?? stacks.set(n, stackText(n)).get(n);
  const fits = (i) => {
    const text = [categories[allocations.category[i]], data.names[c.name[i]], data.layers[c.layer[i]], data.phases[c.phase[i]], stack(c.stack[i])].join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  found.hits = words.length ? Array.from({ length: allocations.one }, (_, i) => i).filter(fits) : [];
  found.at = -1;
  const sum = (hits) => bytes(hits.reduce((total, i) => total + allocations.bytes[i], 0));
  const alive = found.hits.filter((i) => allocations.start[i] <= peak.at_ns && allocations.end[i] > peak.at_ns);
  byId("found").textContent = words.length ? `${count(found.hits.length, "allocation")}; at the peak ${grouped(alive.length)} of them, ${sum(alive)}` : "";
  timeline.redraw();
}
function nextHit(way = 1) {
  if (!found.hits.length) return;
  found.at = (found.at + way + found.hits.length) % found.hits.length;
  timeline.pin({ row: timeline.item, i: found.hits[found.at] }, true);
}
