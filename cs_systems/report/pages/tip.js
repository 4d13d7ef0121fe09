// The tooltip: a heading and lines of text; `{ full }` is a long text in small letters, as the whole of a long heading.
const tip = {
  box: document.getElementById("tip"),
  fill(lines) {
    this.box.hidden = !lines;
    if (!lines) return;
    const [head, ...rest] = lines.filter(Boolean);
    if (head.length > LONGEST_NAME && !rest.some((line) => line.full)) rest.push({ full: head });
    const bold = document.createElement("b");
    bold.textContent = within(head);
    this.box.replaceChildren(bold, ...rest.map((line) => {
      const span = document.createElement("span");
      span.textContent = line.full ?? line;
      if (line.full) span.className = "full";
      return span;
    }));
  },
  place(x, y) {
    const { offsetWidth: width, offsetHeight: height } = this.box;
    this.box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.box.style.top = `${y + 18 + height < innerHeight ? y + 18 : Math.max(8, y - height - 20)}px`;
  },
};
