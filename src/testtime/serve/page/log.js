// The log: every image and every change of the stream, newest first.

import { at, getJson } from "./api.js";
import { changed, fate } from "./answers.js";
import { button, clock, el, keyed, many, percent } from "./dom.js";
import { attempt } from "./notices.js";

const PAGE = 20; // entries shown at first
const FETCHED = 500; // entries asked for at once; the charts are drawn from them
const STEPPED_IN = /^(frozen \(|blended|unknown)|alarm: /; // the guard's words where it changed something

const known = (row) => row.kind === "image" && row.label !== null; // what an unlearned image was is erased
const guarded = (row) => known(row) && (row.reason.startsWith("guard") || STEPPED_IN.test(row.guard ?? ""));
const FILTERS = {
  all: () => true,
  changed: (row) => known(row) && changed(row),
  guard: guarded,
  other: (row) => row.kind !== "image",
};

const phrases = (...parts) => parts.filter(Boolean).join("; ");

// of events other than answered images: what happened, and to what
const WORDS = {
  image: ["Image, unlearned", () => ""],
  label: ["Right answer given", ({ image, label }) => `#${image} is ${label}`],
  classes: ["Classes changed", ({ added, removed }) =>
    phrases(added.length && `added ${added.join(", ")}`, removed.length && `removed ${removed.join(", ")}`)],
  rollback: ["Rolled back", ({ to }) => `to event #${to}`],
  reset: ["Everything forgotten", () => ""],
  unlearn: ["Image unlearned", ({ image }) => `#${image}`],
  import: ["State imported", () => ""],
};

export function makeLog(root, stream, pictures, { signal, choose, unlearn }) {
  const list = root.querySelector("#log");
  const older = root.querySelector("#older");
  const newer = root.querySelector("#newer");
  const tabs = [...root.querySelectorAll("[data-filter]")];
  let filter = "all";
  let length = PAGE;
  let more = true; // whether the server has older ones
  let newest = Infinity; // nothing later is shown: rows must not move under a hand that is about to press "Unlearn"

  const time = (row) => el("time", { className: "soft", dateTime: row.time }, clock(row.time));

  function image(row) {
    const named = (words) => ({ "aria-label": `${words} image #${row.id}` });
    const see = button(pictures.of(row.id), () => choose(row.id), { className: "plain", ...named("Show") });
    const forget = button("Unlearn", async () => {
      const done = await attempt(() => unlearn(row.id));
      if (done) tabs.find((tab) => tab.dataset.filter === filter).focus(); // the row that had it goes
    }, named("Unlearn"));
    const words = el("p", {}, el("b", {}, row.label), el("small"), el("small", { className: "name" }, row.image));
    return el("li", { className: "image" }, see, words, el("p", { className: "fate soft" }), time(row), forget);
  }

  function entry(row) {
    if (known(row)) return image(row);
    const [what, which] = WORDS[row.kind];
    return el("li", {}, el("span", { className: "thumb" }, `#${row.id}`), el("p", {}, el("b", {}, what)),
      el("p", { className: "fate soft" }, row.detail ? which(row.detail) : ""), time(row));
  }

  function refresh(node, row) {
    node.classList.toggle("gone", !row.live);
    if (!known(row)) return;
    const zeroShot = changed(row) ? `, zero-shot ${row.zero_shot}` : "";
    node.querySelector("small").textContent = percent(row.confidence) + zeroShot;
    node.classList.toggle("changed", changed(row));
    node.querySelector(".fate").textContent = phrases(fate(row), guarded(row) && !row.reason && row.guard);
    node.lastElementChild.hidden = !row.live;
  }

  function update() {
    const all = stream.sorted().reverse().filter(FILTERS[filter]);
    const found = all.filter((row) => row.id <= newest);
    newer.hidden = found.length === all.length;
    newer.textContent = `Show ${many(all.length - found.length, "newer entry", "newer entries")}`;
    keyed(list, found.slice(0, length), (row) => `${row.id} ${row.live}`, entry, refresh);
    root.querySelector("#no-log").hidden = found.length > 0;
    older.hidden = found.length <= length && !more;
  }

  async function fetchRows(before) {
    const { images } = await getJson(at(stream.name, `images?limit=${FETCHED}${before}`), { signal });
    more = images.length === FETCHED;
    return images;
  }

  /** Reads the newest entries again; older ones may have changed too, so they are read when asked for. */
  async function fetchNewest() {
    const rows = await fetchRows("");
    const last = rows[0]?.id ?? 0;
    const since = [...stream.rows.values()].filter((row) => row.id > last); // came while these were read
    const merged = [...rows.map((row) => (row.live ? { ...stream.rows.get(row.id), ...row } : row)), ...since];
    stream.rows = new Map(merged.map((row) => [row.id, row]));
  }

  async function fetchOlder() {
    for (const row of await fetchRows(`&before=${Math.min(...stream.rows.keys())}`)) stream.rows.set(row.id, row);
  }

  function show(name) {
    filter = name;
    length = PAGE;
    newest = Infinity;
    for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.dataset.filter === name));
    update();
  }

  const hold = () => { newest = Math.min(newest, Math.max(0, ...stream.rows.keys())); };
  const release = () => {
    if (list.matches(":hover") || list.contains(document.activeElement)) return;
    newest = Infinity;
    update();
  };
  for (const touched of ["pointerenter", "focusin"]) list.addEventListener(touched, hold);
  list.addEventListener("pointerleave", release);
  list.addEventListener("focusout", () => setTimeout(release)); // when the focus has arrived elsewhere
  newer.addEventListener("click", () => show(filter));
  older.addEventListener("click", () => attempt(async () => {
    length += PAGE;
    if (more && stream.sorted().filter(FILTERS[filter]).length < length) await fetchOlder();
    update();
  }));
  for (const tab of tabs) tab.addEventListener("click", () => show(tab.dataset.filter));
  return { update, fetchNewest, show };
}
