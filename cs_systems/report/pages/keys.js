// The list of the keys: `?` opens it.
addEventListener("keydown", (event) => {
  if (event.key !== "?" || isTyping(event)) return;
  byId("help").showModal();
  event.preventDefault();
});
byId("keys").addEventListener("click", () => byId("help").showModal());
