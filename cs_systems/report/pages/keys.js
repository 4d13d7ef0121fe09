// Keys of the whole page: `/` goes to the search, `?` lists the keys, Escape closes what is open.
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "?") byId("help").showModal();
  else if (event.key === "/") {
    const field = byId("search") ?? document.querySelector("input[type=search]");
    field?.focus();
    field?.select();
  } else return;
  event.preventDefault();
});
byId("keys").addEventListener("click", () => byId("help").showModal());
