// The segments at the end: of each pool and stream a row of segments, and a row of their blocks.
class BytesChart extends Chart {
  unit() { return bytesUnit(this.to); }
}
// Return two rows for each pool and stream: its segments, and their blocks below.
function segmentRows() {
  const lanes = new Map();
  for (const segment of data.segments) {
    const key = `${segment.pool} pool · stream ${segment.stream}${segment.private ? " · private" : ""}`;
    if (!lanes.has(key)) lanes.set(key, []);
    lanes.get(key).push(segment);
  }
  return [...lanes].flatMap(([key, of]) => {
    const blocks = of.flatMap((segment) => segment.size.map((size, n) => ({ segment, n, size })));
    const whole = of.reduce((sum, segment) => sum + segment.bytes, 0);
    const count = `${of.length} segment${of.length === 1 ? "" : "s"}`;
    return [
      laid(of, (s) => s.bytes, {
        title: `${key} · ${count} · ${bytes(whole)}`,
        color: (s, i) => (i % 2 ? "odd" : "even"),
        label: (s) => bytes(s.bytes),
        tip: (s) => [`segment of ${bytes(s.bytes)}`, `at ${s.address}`, `${bytes(free(s))} free, in ${s.category.filter((c) => c < 0).length} blocks`],
        details: (s) => ({
          heading: `segment of ${bytes(s.bytes)}`,
          items: [["address", s.address], ["pool", s.pool], ["stream", s.stream], ["blocks", s.size.length], ["free", `${bytes(free(s))}, in ${count(s.category.filter((c) => c < 0).length, "block")}`],
            ["largest free block", bytes(Math.max(0, ...s.size.filter((_, n) => s.category[n] < 0)))]],
        }),
      }),
      laid(blocks, (b) => b.size, {
        color: ({ segment, n }) => (segment.category[n] < 0 ? UNATTRIBUTED : slug(categories[segment.category[n]])),
        label: ({ segment, n }) => data.names[segment.name[n]] ?? categories[segment.category[n]] ?? "free",
        tip: blockTip,
        details: blockDetails,
      }),
    ];
  });
}
const free = (s) => s.size.reduce((sum, size, n) => sum + (s.category[n] < 0 ? size : 0), 0);
function blockTip({ segment, n, size }) {
  const state = segment.pending.includes(n) ? "freed; waiting for another stream" : "free";
  return [`${categories[segment.category[n]] ?? state}: ${bytes(size)}`, data.names[segment.name[n]], data.layers[segment.layer[n]],
    `in a segment of ${bytes(segment.bytes)} at ${segment.address}`, segment.category[n] >= 0 && { full: stackText(segment.stack[n]) || "no stack was recorded" }];
}
function blockDetails({ segment, n, size }) {
  const used = segment.category[n] >= 0, state = segment.pending.includes(n) ? "freed; waiting for another stream" : "free";
  return {
    heading: `${categories[segment.category[n]] ?? state}: ${data.names[segment.name[n]] ?? bytes(size)}`,
    items: [["size", `${bytes(size)} (${grouped(size)} B)`], ["layer", data.layers[segment.layer[n]]], ["block", `${n + 1} of ${segment.size.length}`],
      ["segment", `${bytes(segment.bytes)} at ${segment.address}`], ["pool", segment.pool], ["stream", segment.stream]],
    long: used && (stackText(segment.stack[n]) || "no stack was recorded"),
  };
}
function laid(items, size, { title, color, label: name, tip: tell, details: describe }) {
  const duration = items.map(size), start = [];
  duration.reduce((at, length) => (start.push(at), at + length), 0);
  return {
    title, size: items.length, start, duration,
    shades: Uint8Array.from(items, (item, i) => palette.shade(color(item, i))),
    label: (i) => name(items[i]), tip: (i) => tell(items[i]), details: (i) => describe(items[i]),
  };
}
