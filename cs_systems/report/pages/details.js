// The panel with the details of what is pinned, and with the sums of a selected range. Its text can be selected and copied.
const details = {
  box: byId("details"),
  // Show in a section, `pinned` or `range`: { heading, items: [[name, value]], actions?: [[text, does]], long?, table? }.
  // A value that is { text, does } is a button. Nothing empties the section. A long name is a short heading, and whole as `long`.
  show(section, content, say = false) {
    byId(section).replaceChildren(...(content ? this.parts(content) : []));
    this.box.hidden = !byId("pinned").childElementCount && !byId("range").childElementCount;
    document.body.classList.toggle("docked", !this.box.hidden);
    if (content && say) byId("live").textContent = [content.heading, ...content.items.slice(0, 3).map(([name, value]) => `${name}: ${value?.text ?? value}`)].join("; ");
  },
  parts({ heading, items, actions = [], table, long = heading.length > LONGEST_NAME ? heading : "" }) {
    const list = element("dl", items.filter(([, value]) => value || value === 0).map(([name, value]) => {
      return element("div", [element("dt", name), element("dd", [value.does ? button(value.text, value.does) : String(value)])]);
    }));
    const does = element("p", actions.filter(Boolean).map(([text, act]) => button(text, act)), "buttons");
    return [element("h2", within(heading)), list, ...(table ? [table] : []), ...(long ? [element("pre", long)] : []), ...(actions.length ? [does] : [])];
  },
  // Scroll so that a row of a canvas is not behind the panel; nor the row `other` if there is room for both.
  uncover(canvas, top, other = top) {
    const above = canvas.getBoundingClientRect().top, room = innerHeight - this.box.offsetHeight - 48;
    const [first, last] = [Math.min(top, other), Math.max(top, other)].map((y) => above + y);
    const y = above + top, both = last - first < room - 24;
    if ((both ? last : y) > room) scrollBy(0, (both ? last : y) - room);
    else if ((both ? first : y) < 0) scrollBy(0, (both ? first : y) - 24);
  },
};
function element(tag, content, className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...[content].flat());
  return made;
}
function button(text, does) {
  const made = element("button", text);
  made.type = "button";
  made.addEventListener("click", does);
  return made;
}
byId("details-copy").addEventListener("click", async () => {
  const text = ["pinned", "range"].map((section) => byId(section).innerText).filter(Boolean).join("\n\n");
  try {
    await navigator.clipboard.writeText(text);
    byId("live").textContent = "copied";
  } catch {
    getSelection().selectAllChildren(byId("pinned")); // the browser forbids the clipboard: leave the text selected
  }
});
