// The sums of a selected range of time: kernel time, the share of it that a kernel runs, and the families.
function sumsOf(from, to) {
  const sums = { kernels: 0, time: 0, families: new Map(), busy: new Map() }, running = new Map();
  for (const stream of data.streams) {
    const of = running.get(stream.device) ?? running.set(stream.device, []).get(stream.device);
    stream.start.forEach((start, i) => {
      const begin = Math.max(start, from), end = Math.min(start + stream.duration[i], to);
      if (begin >= end) return;
      const family = familyOf(stream.function[i]), known = sums.families.get(family) ?? [0, 0];
      sums.families.set(family, [known[0] + 1, known[1] + end - begin]);
      sums.kernels += 1;
      sums.time += end - begin;
      of.push([begin, end]);
    });
  }
  for (const [device, intervals] of running) sums.busy.set(device, union(intervals));
  return sums;
}
// Return the time that the intervals cover together.
function union(intervals) {
  let covered = 0, last = -Infinity;
  for (const [begin, end] of intervals.sort((a, b) => a[0] - b[0])) {
    covered += Math.max(end - Math.max(begin, last), 0);
    last = Math.max(last, end);
  }
  return covered;
}
function showSelection(selected) {
  if (!selected || selected[1] <= selected[0]) return details.show("range", null);
  const [from, to] = selected, sums = sumsOf(from, to);
  const rows = [...sums.families].sort((a, b) => b[1][1] - a[1][1]).map(([family, [kernels, busy]]) => {
    return element("tr", [element("td", [swatch(family), family]), ...[grouped(kernels), time(busy), share(busy, sums.time)].map((text) => element("td", text, "number"))]);
  });
  const heads = ["family", "kernels", "time", "share"].map((text, n) => element("th", text, n ? "number" : ""));
  details.show("range", {
    heading: `selected: ${time(to - from)}`,
    items: [["from", exactly(Math.round(from))], ["to", exactly(Math.round(to))], ["kernels", grouped(sums.kernels)], ["sum of kernel times", time(sums.time)],
      ...[...sums.busy].map(([device, busy]) => [`GPU ${device} busy`, `${share(busy, to - from)} (${time(busy)})`])],
    table: rows.length ? element("table", [element("thead", element("tr", heads)), element("tbody", rows)]) : undefined,
    actions: [["zoom to it", () => timeline.show(from, to)], ["select none", () => timeline.select(null)]],
  }, true);
}
