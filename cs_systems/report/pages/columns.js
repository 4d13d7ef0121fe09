// The page's data: JSON whose long lists of whole numbers are packed (see _packing.py).
function unpacked(text) {
  return JSON.parse(text, (_, value) => (value?.none && (value.numbers ?? value.differences) !== undefined ? column(value) : value));
}
function column({ numbers, differences, none }) {
  const packed = atob(numbers ?? differences), values = [];
  let value = 0, scale = 1, last = 0;
  for (let k = 0; k < packed.length; k++) {
    const byte = packed.charCodeAt(k);
    value += (byte & 127) * scale; // not by shifts, which have 32 bits
    scale *= 128;
    if (byte & 128) continue;
    const number = value % 2 ? -(value + 1) / 2 : value / 2; // the sign is the lowest bit
    last = differences === undefined ? number : last + number;
    values.push(last);
    value = 0;
    scale = 1;
  }
  for (const i of none) values[i] = null;
  return values;
}
