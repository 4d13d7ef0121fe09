// Numbers as text, the same on every page.
const byId = (id) => document.getElementById(id);
const digits = (value) => value >= 999.5 ? grouped(Math.round(value)) : value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.max(value, 1)))));
function time(ns) {
  if (!ns) return "0 s";
  const [unit, name] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${unit === 1 ? Math.round(ns) : digits(ns / unit)} ${name}`;
}
const bytesUnit = (n) => [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([unit]) => n >= unit) ?? [1, "B"];
function bytes(n) {
  const [unit, name] = bytesUnit(n);
  return `${unit === 1 ? n : digits(n / unit)} ${name}`;
}
const LONGEST_NAME = 60; // characters; AMD's products of matrices have names of 500
const within = (name, most = LONGEST_NAME) => (name.length > most ? `${name.slice(0, most >> 1)}…${name.slice(1 - (most - (most >> 1)))}` : name);
const grouped = (n) => n.toLocaleString("en");
const share = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)}%`;
const count = (n, what, plural = `${what}s`) => `${grouped(n)} ${n === 1 ? what : plural}`;
