// The snapshot, from the JSON in the page. Names are set as text, never as HTML.
const started = performance.now();
const data = unpacked(byId("snapshot").textContent);
const { categories } = data, peak = data.highest; // of the history; it is the peak unless that is unknown
const slug = (category) => category.replaceAll(" ", "-");
for (const category of categories) palette.shade(slug(category));
let alone = null; // the category that is shown alone

// Allocations as columns, by their start. The bands of the others come last; they have no stack.
const allocations = (() => {
  const c = data.allocations, bands = data.rest.bands, one = c.bytes.length, size = one + bands.length;
  const made = { size, one, start: new Float64Array(size), end: new Float64Array(size), bytes: new Float64Array(size), category: new Uint8Array(size), before: new Set(c.before) };
  let at = 0;
  for (let i = 0; i < one; i++) {
    at += c.later_ns[i];
    made.start[i] = at;
    made.end[i] = at + c.duration_ns[i];
  }
  made.bytes.set(c.bytes);
  made.category.set(c.category);
  bands.forEach(([category, from, to, most], n) => {
    Object.assign(made.start, { [one + n]: from });
    Object.assign(made.end, { [one + n]: to });
    made.bytes[one + n] = most;
    made.category[one + n] = category;
  });
  return made;
})();

// Moments at which allocated memory changes, and the bytes of each category from then on.
const levels = (() => {
  const { size, start, end, bytes: given, category } = allocations, count = categories.length;
  const changes = new Float64Array(2 * size), owner = new Uint32Array(2 * size);
  const order = Array.from({ length: 2 * size }, (_, n) => n);
  for (let i = 0; i < size; i++) {
    changes[i] = start[i];
    changes[size + i] = end[i];
    owner[i] = owner[size + i] = i;
  }
  order.sort((a, b) => changes[a] - changes[b] || b - a); // an end before a start
  const at = [], total = [], by = [];
  const now = new Float64Array(count);
  let sum = 0;
  order.forEach((n, k) => {
    const i = owner[n], change = n < size ? given[i] : -given[i];
    now[category[i]] += change;
    sum += change;
    const next = order[k + 1];
    if (next !== undefined && changes[next] === changes[n]) return;
    at.push(changes[n]);
    total.push(sum);
    by.push(...now);
  });
  return { at: Float64Array.from(at), total: Float64Array.from(total), by: Float64Array.from(by), size: at.length };
})();

// Return the index of the last moment at or before t, or -1.
function lastBefore(at, size, t) {
  let low = 0, high = size;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}


// Events that allocate or free a block, in order; the bands of the others have none.
const events = (() => {
  const { made, freed } = data.allocations, at = new Int32Array(data.events).fill(-1);
  made.forEach((event, i) => { if (event !== null) at[event] = 2 * i + 1; });
  freed.forEach((event, i) => { if (event !== null) at[event] = 2 * i; });
  const number = Int32Array.from(at.keys()).filter((event) => at[event] >= 0), code = (k) => at[number[k]];
  return {
    size: number.length, number, // the event's number in the snapshot
    allocation: (k) => code(k) >> 1, allocates: (k) => code(k) % 2 === 1,
    time: (k) => (code(k) % 2 ? allocations.start : allocations.end)[code(k) >> 1],
  };
})();
const stackText = (stack) => data.stacks[stack].map((frame) => data.frames[frame]).join("\n");
