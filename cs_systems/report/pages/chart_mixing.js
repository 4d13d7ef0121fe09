// Boxes narrower than NARROW pixels: their colours are mixed by pixel. A pixel is as opaque as it is covered, so that a busy
// GPU and an idle one look different. Rows of many boxes keep such sums in bins, of two levels of detail, so that a frame costs
// little however many boxes are in view: the coarsest level is used that has bins finer than a pixel.
const NARROW = 3, FAINT = 0.12, LEAST_SEEN = 0.3; // the last two: opacity of what is not asked for, and of a pixel with any box
const LEVELS = [1 << 14, 1 << 18], FINE = 2; // bins of a row; the least number of them in a pixel
const SUMS = 5; // of a pixel or bin: covered, red, green and blue of what covers it, the highest opacity

// Write the row's narrow boxes into a line of `pixels`; return the wide ones as [row, i].
function mixed(row, { from, to, end }, columns, pixels, line) {
  const scale = columns / (to - from), sums = new Float32Array(columns * SUMS), wide = [];
  const level = LEVELS.find((count) => row.size > count / 2 && scale * end * FINE <= count), bins = level ? binsOf(row, end, level) : null;
  const take = (i) => {
    if (row.duration[i] * scale >= NARROW) wide.push([row, i]);
    else pour(sums, columns, row, i, from, scale);
  };
  if (bins) {
    for (const i of bins.long) if (row.start[i] < to && row.start[i] + row.duration[i] > from) take(i);
    pourBins(sums, columns, bins.sums, from, to, scale, end / level);
  } else for (let i = firstEnding(row, from); i < row.size && row.start[i] < to; i++) take(i);
  for (let k = 0, out = line * columns * 4; k < sums.length; k += SUMS, out += 4) {
    const covered = sums[k];
    if (!covered) continue;
    for (let color = 0; color < 3; color++) pixels[out + color] = sums[k + 1 + color] / covered;
    pixels[out + 3] = 255 * Math.max(Math.min(covered, 1), LEAST_SEEN * sums[k + 4]);
  }
  return wide;
}
// Add a box to the sums of the pixels or bins that it covers.
function pour(sums, columns, row, i, from, scale) {
  const left = (row.start[i] - from) * scale, right = left + row.duration[i] * scale;
  const color = palette.rgb[row.shades[i]], opacity = row.faint?.[i] ? FAINT : 1, last = Math.min(right | 0, columns - 1);
  for (let x = Math.max(left | 0, 0); x <= last; x++) {
    const covered = Math.max(Math.min(right, x + 1) - Math.max(left, x), 1e-3) * opacity, k = x * SUMS;
    sums[k] += covered;
    sums[k + 1] += covered * color[0];
    sums[k + 2] += covered * color[1];
    sums[k + 3] += covered * color[2];
    if (opacity > sums[k + 4]) sums[k + 4] = opacity;
  }
}
function pourBins(sums, columns, bins, from, to, scale, width) {
  const last = Math.min(Math.ceil(to / width), bins.length / SUMS);
  for (let bin = Math.floor(from / width); bin < last; bin++) {
    const b = bin * SUMS, k = Math.min(Math.max(((bin + 0.5) * width - from) * scale | 0, 0), columns - 1) * SUMS;
    for (let n = 0; n < 4; n++) sums[k + n] += bins[b + n] * width * scale;
    sums[k + 4] = Math.max(sums[k + 4], bins[b + 4]);
  }
}
// Return the sums of the row's boxes in `count` bins, and the `long` ones, which can be wide where bins are used and are in none.
function binsOf(row, end, count) {
  if (row.bins?.faint !== row.faint || row.bins?.rgb !== palette.rgb) row.bins = { faint: row.faint, rgb: palette.rgb, levels: {} };
  const known = row.bins.levels[count];
  if (known) return known;
  const made = (row.bins.levels[count] = { sums: new Float32Array(count * SUMS), long: [] }), scale = count / end;
  for (let i = 0; i < row.size; i++) {
    if (row.duration[i] * scale >= NARROW * FINE) made.long.push(i);
    else pour(made.sums, count, row, i, 0, scale);
  }
  return made;
}
