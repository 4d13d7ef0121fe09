// The page's data: JSON whose long lists of whole numbers are packed (see _packing.py).
// typed: make a list without null a Float64Array, which takes less memory and time.
function unpacked(text, typed = false) {
  return JSON.parse(text, (_, value) => (value?.none && (value.numbers ?? value.differences ?? value.same) !== undefined ? column(value, typed) : value));
}
const bytesOf = (text) => Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
function column(given, typed) {
  const found = given.count === undefined ? decoded(given) : new Float64Array(given.count).fill(given.same);
  if (typed && !given.none.length) return found;
  const listed = Array.from(found);
  for (const i of given.none) listed[i] = null;
  return listed;
}
function decoded({ numbers, differences }) {
  const packed = bytesOf(numbers ?? differences), values = new Float64Array(packed.length), sums = numbers === undefined;
  let count = 0, last = 0;
  for (let k = 0; k < packed.length; k++) {
    let byte = packed[k], value = byte & 127;
    for (let scale = 128; byte & 128; scale *= 128) { // not by shifts, which have 32 bits
      byte = packed[++k];
      value += (byte & 127) * scale;
    }
    const number = value % 2 ? -(value + 1) / 2 : value / 2; // the sign is the lowest bit
    last = sums ? last + number : number;
    values[count++] = last;
  }
  return values.slice(0, count);
}
