// The guided tour: a stream of stored features of real photographs, explained in six steps with its live numbers.

import { at, send } from "./api.js";
import { button, count, el, many, percent } from "./dom.js";
import { rollBack } from "./manage.js";
import { attempt } from "./notices.js";

const BACK_TO = 100; // images that are left after the tour goes back
const GUARD = "guard: "; // how its reasons begin

let touring = null; // the name of the stream that this tab's tour shows

/** Starts the tour on the server; returns the name of its stream. */
export async function startTour() {
  const made = await send("POST", "tour");
  touring = made.name;
  return made.name;
}

const accuracy = (stream, line) => (stream.accuracy.length ? percent(stream.accuracy.at(-1).values[line], 1) : "…");

function reasons(refused) {
  const found = Object.entries(refused).filter(([reason]) => reason.startsWith(GUARD));
  return found.map(([reason, number]) => `${count(number)} ${reason.slice(GUARD.length)}`).join(", ") || "none so far";
}

const STEPS = [
  ["A frozen classifier", "answer-part", ({ info, accuracy: seen }, right) =>
    `Photographs arrive. A zero-shot classifier compares each with one sentence for each of ${info.classes.length} `
    + `classes, and never changes.${seen.length ? ` Of ${count(seen.at(-1).x)} it got ${right(1)} right.` : ""}`],
  ["Queues fill", "queues-part", ({ info, filled }) =>
    "The surest images of each class enter its queue, by the classifier's own answers: nobody gives a label. "
    + `${filled} of ${info.classes.length} classes have images by now.`],
  ["Prototypes move", "map-part", () =>
    "The mean of a queue is a visual prototype: what the class looks like here. Watch the discs move as surer images "
    + "replace earlier ones, and pull the rings, the text prototypes, after them."],
  ["Answers change", "course-part", ({ info }, right) =>
    `Text and visual prototypes answer together. ${count(info.changed)} of ${many(info.images, "answer")} differ from `
    + `zero-shot; ${right(0)} of all are right, against ${right(1)}.`],
  ["The guard refuses", "log-part", ({ info }) =>
    "Learning from everything would be risky. An image that repeats, looks foreign, or whose class floods the stream "
    + `gets its answer, but teaches nothing. So far: ${reasons(info.refused)}.`],
  ["And back again", "snapshots-part", ({ info }) =>
    `Every image is an event in a log, so that any moment can be restored, bit for bit. ${many(info.images, "image")} `
    + `count now: go back to the first ${BACK_TO}, and watch the numbers.`],
];

/** The tour's panel, if this stream is the tour's. */
export function joinTour(root, signal, stream, log) {
  if (stream.name !== touring) return { update() {} };
  let step = 0;
  let mark = null; // the first image that is forgotten by going back
  const place = el("span", { className: "soft" });
  const heading = el("h2", { tabIndex: -1, id: "tour-title" });
  const text = el("p");
  const undo = button("Roll back now", () => attempt(goBack));
  const back = button("Back", () => go(step - 1));
  const next = button("Next", () => (step + 1 < STEPS.length ? go(step + 1) : finish()), { className: "main" });
  const close = button("×", leave, { className: "quiet", "aria-label": "Close the tour" });
  const panel = el("aside", { id: "tour", "aria-labelledby": "tour-title" },
    el("div", { className: "tour-head" }, place, close), heading, text,
    el("p", { className: "actions" }, back, undo, next));

  function leave() {
    touring = null;
    panel.remove();
    document.body.classList.remove("touring");
    for (const marked of root.querySelectorAll(".spot")) marked.classList.remove("spot");
  }

  async function goBack() {
    await rollBack(stream, { before: mark }, false);
    mark = null;
  }

  async function finish() {
    leave();
    await attempt(() => send("DELETE", at(stream.name)));
    location.hash = "#/";
  }

  function go(number) {
    step = number;
    for (const marked of root.querySelectorAll(".spot")) marked.classList.remove("spot");
    const section = root.querySelector(`#${STEPS[step][1]}`);
    section.classList.add("spot");
    if (STEPS[step][1] === "log-part") log.show("guard");
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    section.scrollIntoView({ block: "start", behavior: still ? "auto" : "smooth" });
    place.textContent = `${step + 1} of ${STEPS.length}`;
    heading.textContent = STEPS[step][0];
    back.hidden = step === 0;
    undo.hidden = step + 1 < STEPS.length;
    next.textContent = step + 1 < STEPS.length ? "Next" : "Finish";
    update();
    heading.focus({ preventScroll: true });
  }

  function update() {
    if (!stream.info) return;
    text.textContent = STEPS[step][2](stream, (line) => accuracy(stream, line));
    mark ??= stream.images()[BACK_TO]?.id ?? null;
    undo.disabled = mark === null;
  }

  root.append(panel);
  document.body.classList.add("touring");
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
  signal.addEventListener("abort", leave);
  go(0);
  return { update };
}
