// The log: every image and every change of the stream, newest first.

import { at, getJson } from "./api.js";
import { changed, fate } from "./answers.js";
import { clock, el, keyed, many, percent } from "./dom.js";
import { attempt } from "./notices.js";

const PAGE = 50; // entries shown at first
const FETCHED = 500; // entries asked for at once; the charts are drawn from them
const STEPPED_IN = /^(frozen \(|blended|unknown)|alarm: /; // the guard's words where it did more than let an answer pass

const guarded = (row) => row.kind === "image" && (row.reason?.startsWith("guard") || STEPPED_IN.test(row.guard ?? ""));
const FILTERS = {
  all: () => true,
  changed: (row) => row.kind === "image" && changed(row),
  guard: guarded,
  other: (row) => row.kind !== "image",
};

const WORDS = {
  label: "Right answer given",
  classes: "Classes changed",
  rollback: "Rolled back",
  reset: "Everything forgotten",
  unlearn: "Image unlearned",
  import: "State imported",
};

const told = (detail) => Object.entries(detail ?? {})
  .filter(([, value]) => value !== null && String(value) !== "")
  .map(([key, value]) => `${key} ${[value].flat().join(", ")}`).join("; ");

export function makeLog(root, stream, pictures, actions) {
  const list = root.querySelector("#log");
  const older = root.querySelector("#older");
  const newer = root.querySelector("#newer");
  const tabs = [...root.querySelectorAll("[data-filter]")];
  let filter = "all";
  let length = PAGE;
  let more = true; // whether the server has older ones
  let newest = Infinity; // nothing later is shown: rows must not move under a hand that is about to press "Unlearn"

  function image(row) {
    return [
      el("button", { type: "button", className: "plain", "aria-label": `Show image #${row.id}`, onclick: () => actions.choose(row.id) }, pictures.of(row.id)),
      el("p", {}, el("b", {}, row.label), el("small"), el("small", { className: "name" })),
      el("p", { className: "fate soft" }),
      el("time", { className: "soft", dateTime: row.time }, clock(row.time)),
      el("button", { type: "button", "aria-label": `Unlearn image #${row.id}`, onclick: () => attempt(() => actions.unlearn(row.id)) }, "Unlearn"),
    ];
  }

  function entry(row) {
    if (row.kind === "image") return el("li", { className: "image" }, ...image(row));
    return el("li", {}, el("span", { className: "thumb" }, `#${row.id}`), el("p", {}, el("b", {}, WORDS[row.kind] ?? row.kind)),
      el("p", { className: "fate soft" }, told(row.detail)), el("time", { className: "soft", dateTime: row.time }, clock(row.time)));
  }

  function refresh(node, row) {
    node.classList.toggle("gone", row.live === false);
    if (row.kind !== "image") return;
    const [beside, name] = node.querySelectorAll("small");
    beside.textContent = changed(row) ? `${percent(row.confidence)}, zero-shot ${row.zero_shot}` : percent(row.confidence);
    name.textContent = row.image;
    node.classList.toggle("changed", changed(row));
    node.querySelector(".fate").textContent = [fate(row), guarded(row) && !row.reason && row.guard].filter(Boolean).join("; ");
    node.lastElementChild.hidden = row.live === false;
  }

  function update() {
    const all = stream.sorted().reverse().filter(FILTERS[filter]);
    const found = all.filter((row) => row.id <= newest);
    newer.hidden = found.length === all.length;
    newer.textContent = `Show ${many(all.length - found.length, "newer entry", "newer entries")}`;
    keyed(list, found.slice(0, length), (row) => row.id, entry, refresh);
    root.querySelector("#no-log").hidden = found.length > 0;
    older.hidden = found.length <= length && !more;
  }

  /** Fetches a page of older entries; from the newest on if there are none yet. */
  async function fetchOlder(signal) {
    const before = stream.rows.size ? `&before=${Math.min(...stream.rows.keys())}` : "";
    const { images } = await getJson(at(stream.name, `images?limit=${FETCHED}${before}`), { signal });
    for (const row of images) stream.rows.set(row.id, row);
    more = images.length === FETCHED;
  }

  for (const tab of tabs) {
    tab.addEventListener("click", () => show(tab.dataset.filter));
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
    if (more && stream.sorted().filter(FILTERS[filter]).length < length) await fetchOlder(actions.signal);
    update();
  }));
  return { update, fetchOlder, show };
}
