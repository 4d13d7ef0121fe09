// Colours by name, read from the style sheet. A row of a chart has a shade for each box: an index in `palette.names`.
const HATCHED = "unattributed"; // the colour whose boxes are hatched
const palette = {
  names: [],
  css: {},
  rgb: [], // of each shade: red, green, blue
  shade(name) {
    const known = this.names.indexOf(name);
    return known < 0 ? this.names.push(name) - 1 : known;
  },
  read() {
    const style = getComputedStyle(document.documentElement);
    const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const used = [...this.names, "ink", "soft", "line", "page", "accent", "hatch", "on-block", "reserved"];
    this.css = Object.fromEntries(used.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.rgb = this.names.map((name) => {
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = this.css[name];
      pixel.fillRect(0, 0, 1, 1);
      return [...pixel.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    });
  },
};
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
