// The list of the keys, which `?` opens, and the controls that the pages share.
function listKeys() {
  byId("help").showModal();
  byId("help").scrollTop = 0; // the button that gets the focus stands at the end
}
addEventListener("keydown", (event) => {
  if (event.key !== "?" || isTyping(event)) return;
  listKeys();
  event.preventDefault();
});
byId("keys").addEventListener("click", listKeys);

// Connect the buttons of a timeline and the field of the search to their functions.
function controls(timeline, search, nextHit) {
  byId("in").addEventListener("click", () => timeline.zoom(0.5));
  byId("out").addEventListener("click", () => timeline.zoom(2));
  byId("whole").addEventListener("click", () => timeline.whole());
  byId("search").addEventListener("input", search);
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") timeline.canvas.focus();
    else return;
    event.preventDefault();
  });
}
