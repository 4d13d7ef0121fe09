// The page of several ranks: for each rank what it computes, and its communication, as waiting and transfer.
const started = performance.now();
const data = unpacked(byId("ranks").textContent, true);
const STATES = ["waiting", "communication", "outside"]; // colours by state of a box
const MEANING = { waiting: "waiting for other ranks", communication: "transfer", outside: "communication without counterpart" };
const colorName = (color) => MEANING[color] ?? (color === UNATTRIBUTED ? "other work, copies" : color);
const asked = { words: [], color: null, hits: [], at: -1 };
const byMatch = new Map(); // number of a matched collective → its boxes on all ranks, as hits
const sizeOf = (kind) => (kind.bytes === null ? "" : bytes(kind.bytes));
const callName = (kind) => [kind.name, sizeOf(kind)].filter(Boolean).join(", ");

function span(rank, { start, duration }, i, more) {
  return [["rank", String(rank.rank)], ["duration", exactly(duration[i])], ["starts at", exactly(start[i])], ...more];
}
const selecting = ({ start, duration }, i) => ["sum up this range", () => timeline.select(start[i], start[i] + duration[i])];
function computeRows(rank) {
  const { compute } = rank, phase = (i) => data.phases[compute.phase[i]];
  return laneOf(compute, {
    label: phase, texts: data.phases, text: (i) => compute.phase[i], color: (i) => phaseColor(phase(i)),
    tip: (i) => [phase(i), when(compute.start[i], compute.duration[i]), `computation of rank ${rank.rank}`],
    details: (i) => ({ heading: `${phase(i)}, rank ${rank.rank}`, items: span(rank, compute, i, [["kind", "computation"]]), actions: [selecting(compute, i)] }),
  }).rows;
}
function callRows(rank) {
  const { calls } = rank, kind = (i) => data.kinds[calls.kind[i]], state = (i) => STATES[calls.state[i]];
  const lastOf = (i) => (calls.match[i] === null ? null : data.matches.last[calls.match[i]]);
  const who = (i) => (lastOf(i) === null ? "no counterpart on another rank was found" : lastOf(i) === rank.rank ? "this rank arrives last" : `rank ${lastOf(i)} arrives last`);
  const made = laneOf(calls, {
    label: (i) => (state(i) === "waiting" ? `waiting: ${kind(i).name}` : callName(kind(i))),
    texts: data.kinds.map(callName), text: (i) => calls.kind[i], color: state,
    tip: (i) => [callName(kind(i)), `${MEANING[state(i)]}: ${when(calls.start[i], calls.duration[i])}`, who(i), `rank ${rank.rank}`],
    details: (i) => ({
      heading: `${callName(kind(i))}, rank ${rank.rank}`,
      items: span(rank, calls, i, [["kind", MEANING[state(i)]], ["group", kind(i).group],
        ["arrives last", lastOf(i) !== null && { text: `rank ${lastOf(i)}`, does: () => pinOf(calls.match[i], lastOf(i)) }],
        ["transfer", lastOf(i) !== null && time(data.matches.transfer[calls.match[i]])]]),
      actions: [selecting(calls, i)],
    }),
    match: (i) => calls.match[i],
  });
  calls.match.forEach((match, i) => {
    const hit = match === null ? null : made.hit(i);
    if (!hit) return;
    if (!byMatch.has(match)) byMatch.set(match, []);
    byMatch.get(match).push({ ...hit, rank: rank.rank });
  });
  return made.rows;
}
// Pin a collective on one rank.
function pinOf(match, rank) {
  const hit = byMatch.get(match).findLast((one) => one.rank === rank);
  if (hit) timeline.pin(hit, true);
}
function rankRows(rank) {
  const rows = [...computeRows(rank), ...callRows(rank)];
  if (rows.length) rows[0].title = [`rank ${rank.rank}`, rank.host].filter(Boolean).join(" · ");
  for (const row of rows) row.rank = rank;
  return rows;
}
function stepRows() {
  const { steps } = data, title = (i) => `step ${steps.number[i]}`;
  return laneOf(steps, {
    label: title, color: (i) => (i % 2 ? "odd" : "even"), texts: Array.from(steps.number, (_, i) => title(i)), text: (i) => i,
    tip: (i) => [title(i), when(steps.start[i], steps.duration[i])],
    details: (i) => ({ heading: title(i), items: [["wall clock", time(steps.duration[i])], ["starts at", exactly(steps.start[i])]], actions: [selecting(steps, i)] }),
  }, `steps of rank ${data.ranks[0].rank}`).rows;
}

const rows = data.ranks.flatMap(rankRows);
const timeline = new Chart(byId("timeline"), [...stepRows(), ...rows], data.end_ns);
const overview = new Overview(byId("overview"), timeline, rows, data.steps, () => asked.hits);
timeline.onShow = (from, to) => { byId("shown").textContent = `${time(from)} … ${time(to)} of ${time(data.end_ns)} recorded.`; };
timeline.onDraw = () => overview.draw();
timeline.onPin = (hit) => {
  const match = hit?.row.say.match?.(hit.row.items[hit.i]) ?? null;
  timeline.marked = match === null ? [] : byMatch.get(match);
  details.show("pinned", hit && hit.row.details(hit.i), true);
  if (hit) details.uncover(timeline.canvas, hit.row.top);
};
timeline.onSelect = (selected) => {
  if (!selected || selected[1] <= selected[0]) return details.show("range", null);
  const [from, to] = selected, colors = used(), long = to - from;
  const body = data.ranks.map((rank) => {
    const sums = sumsOf(rank, from, to);
    return element("tr", [element("td", `rank ${rank.rank}`), ...colors.map((color) => element("td", sums.has(color) ? time(sums.get(color)) : "", "number"))]);
  });
  const heads = ["rank", ...colors.map(colorName)].map((text, n) => element("th", text, n ? "number" : ""));
  details.show("range", {
    heading: `selected: ${time(long)}`, items: [["from", exactly(Math.round(from))], ["to", exactly(Math.round(to))]],
    table: element("table", [element("thead", element("tr", heads)), element("tbody", body)]),
    actions: [["zoom to it", () => timeline.show(from, to)], ["select none", () => timeline.select(null)]],
  }, true);
};
// Return the time of each colour of a rank within a range.
function sumsOf(rank, from, to) {
  const sums = new Map();
  for (const row of rows) {
    if (row.rank !== rank) continue;
    for (let k = firstEnding(row, from); k < row.size && row.start[k] < to; k++) {
      const color = palette.names[row.shades[k]], within = Math.min(row.start[k] + row.duration[k], to) - Math.max(row.start[k], from);
      sums.set(color, (sums.get(color) ?? 0) + within);
    }
  }
  return sums;
}
const ORDER = [...PHASES, UNATTRIBUTED, ...STATES];
const used = () => [...new Set(rows.flatMap((row) => [...new Set(row.shades)]))].map((shade) => palette.names[shade]).sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));

function update() {
  const any = asked.words.length || asked.color !== null, shade = palette.names.indexOf(asked.color);
  asked.hits = [];
  asked.at = -1;
  for (const row of timeline.rows) {
    const fits = row.say.texts.map((text) => asked.words.every((word) => text.toLowerCase().includes(word)));
    row.faint = any ? new Uint8Array(row.size) : null;
    for (let i = 0; any && i < row.size; i++) {
      if (fits[row.say.text(row.items[i])] && (asked.color === null || row.shades[i] === shade)) asked.hits.push({ row, i });
      else row.faint[i] = 1;
    }
  }
  asked.hits.sort((a, b) => a.row.start[a.i] - b.row.start[b.i]);
  byId("found").textContent = any ? count(asked.hits.length, "box", "boxes") : "";
  for (const one of byId("families").children) one.setAttribute("aria-pressed", String(one.dataset.color === asked.color));
  timeline.redraw();
}
function search() {
  asked.words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  update();
}
function nextHit(way = 1) {
  const { hits } = asked;
  if (!hits.length) return;
  asked.at = (asked.at + (asked.at < 0 && way < 0 ? 0 : way) + hits.length) % hits.length;
  timeline.focus(hits[asked.at], 4);
  timeline.pin(hits[asked.at]);
}
byId("families").append(...used().map((color) => {
  const made = button("", () => {
    asked.color = asked.color === color ? null : color;
    update();
  });
  made.dataset.color = color;
  made.setAttribute("aria-pressed", "false");
  made.append(swatch(color), colorName(color));
  return made;
}));
timeline.keys = { n: () => nextHit(), N: () => nextHit(-1) };
timeline.onEscape = () => {
  byId("search").value = "";
  asked.color = null;
  search();
};
controls(timeline, search, nextHit);
byId("select").addEventListener("click", () => timeline.select(timeline.from, timeline.to));
byId("details-close").addEventListener("click", () => {
  timeline.pin(null);
  timeline.select(null);
  timeline.canvas.focus();
});
drawAnewOnChange(() => [timeline]);
timeline.whole();
timeline.draw();
Object.assign(document.documentElement.dataset, { buildMs: (performance.now() - started).toFixed(1), readyMs: performance.now().toFixed(1) });
