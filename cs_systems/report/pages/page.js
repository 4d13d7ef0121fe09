// Sorting and filtering of the tables of every page.
"use strict";
// Tables sort by a click or the Enter key on a heading; `#sort=TABLE,COLUMN[,descending]` sorts on opening. Unknown values stay last.
function sortTable(table, column, direction) {
  const heads = [...table.tHead.rows[0].cells];
  const sign = direction === "descending" ? -1 : 1;
  const key = (row) => {
    const cell = row.cells[column];
    if (!("v" in cell.dataset)) return cell.textContent;
    return cell.dataset.v === "" ? null : Number(cell.dataset.v);
  };
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
  };
  const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
  rows.sort((a, b) => compare(a[0], b[0]));
  table.tBodies[0].append(...rows.map(([, row]) => row));
  heads.forEach((head, i) => head.setAttribute("aria-sort", i === column ? direction : "none"));
}

for (const head of document.querySelectorAll("th[aria-sort]")) {
  head.querySelector("button").addEventListener("click", () => {
    const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    sortTable(head.closest("table"), head.cellIndex, direction);
  });
}

for (const input of document.querySelectorAll("input[data-filters]")) {
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of document.getElementById(input.dataset.filters).tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}

function sortAsAddressed() {
  const asked = /^#sort=([^,]+),(\d+)(?:,(ascending|descending))?$/.exec(decodeURIComponent(location.hash));
  const table = asked && document.getElementById(asked[1]);
  if (table && table.tHead && Number(asked[2]) < table.tHead.rows[0].cells.length) {
    sortTable(table, Number(asked[2]), asked[3] || "ascending");
  }
}
addEventListener("hashchange", sortAsAddressed);
sortAsAddressed();

// The list of contents closes behind the reader.
const contents = document.querySelector(".contents");
addEventListener("click", (event) => {
  if (contents && (!contents.contains(event.target) || event.target.closest("a"))) contents.open = false;
});

// `/` goes to the first search field of the page.
const isTyping = (event) => event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=radio], [type=range]), select, textarea");
addEventListener("keydown", (event) => {
  const field = document.querySelector("input[type=search]");
  if (event.key !== "/" || isTyping(event) || !field) return;
  field.focus();
  field.select();
  event.preventDefault();
});
