// Colours by name, read from the style sheet. A row of a chart has a shade for each box: an index in `palette.names`.
const UNATTRIBUTED = "unattributed";
const HATCHES = { [UNATTRIBUTED]: 1, other: -1, outside: -1, waiting: -1 }; // names whose boxes are hatched, and the slope of the lines
function swatch(name) {
  const made = element("i", []), slope = HATCHES[name];
  made.style.background = slope ? `repeating-linear-gradient(${-45 * slope}deg, var(--hatch) 0 1px, var(--${name}) 1px 4px)` : `var(--${name})`;
  return made;
}
const palette = {
  names: [],
  css: {},
  over: {}, // name → colour of text on it
  rgb: [], // of each shade: red, green, blue
  shade(name) {
    const known = this.names.indexOf(name);
    return known < 0 ? this.names.push(name) - 1 : known;
  },
  read() {
    const style = getComputedStyle(document.documentElement);
    const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const used = [...this.names, "ink", "soft", "line", "page", "accent", "hatch"];
    this.css = Object.fromEntries(used.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.rgb = this.names.map((name) => {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = this.css[name];
      pixel.fillRect(0, 0, 1, 1);
      return [...pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    });
    this.over = Object.fromEntries(this.names.map((name, n) => [name, HATCHES[name] ? this.css.ink : textOn(this.rgb[n])]));
  },
};
// Return black or white, the one that has more contrast to a colour.
function textOn(rgb) {
  const [red, green, blue] = rgb.map((of) => (of / 255 <= 0.04045 ? of / 255 / 12.92 : ((of / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}
// Read the colours anew, and draw at once, where the scheme changes or the page is printed.
function drawAnewOnChange(charts) {
  const anew = () => {
    palette.read();
    for (const chart of charts()) chart.draw();
  };
  for (const query of ["(prefers-color-scheme: dark)", "print", "(forced-colors: active)"]) matchMedia(query).addEventListener("change", anew);
  addEventListener("beforeprint", anew);
  addEventListener("afterprint", anew);
}
