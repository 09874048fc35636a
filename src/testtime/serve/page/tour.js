// The guided tour: a stream of stored features of real photographs, explained in six steps with its live numbers.

import { at, send } from "./api.js";
import { count, el, many, percent } from "./dom.js";
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
  ["A frozen classifier", "answer-part", ({ info, accuracy: seen }, share) =>
    `Photographs arrive. A zero-shot classifier compares each with one sentence for each of ${info.classes.length} classes, and never `
    + `changes. ${seen.length ? `Of ${many(seen.at(-1).x, "photograph")} it got ${share(1)} right.` : ""}`],
  ["Queues fill", "queues-part", ({ info, filled }) =>
    "The surest images of each class enter its queue, by the classifier's own answers: nobody gives a label. "
    + `${filled} of ${info.classes.length} classes have images by now.`],
  ["Prototypes move", "map-part", () =>
    "The mean of a queue is a visual prototype: what the class looks like here. Watch the discs move away from their rings, the "
    + "sentences, as better examples replace earlier ones."],
  ["Answers change", "course-part", ({ info }, share) =>
    `Both kinds of prototypes answer together. ${many(info.changed, "answer")} of ${count(info.images)} now ${info.changed === 1 ? "differs" : "differ"} from zero-shot: `
    + `${share(0)} are right, against ${share(1)}.`],
  ["The guard refuses", "log-part", ({ info }) =>
    `Learning from everything would be risky. The guard lets an image answer but not teach if it repeats, looks foreign, or its class `
    + `floods the stream. Refused: ${reasons(info.refused)}.`],
  ["And back again", "snapshots-part", ({ info }) =>
    `Every image is an event in a log, so that nothing is learned for good. Try it: ${many(info.images, "image")} are learned now, and one click `
    + "restores the classifier bit by bit to an earlier one."],
];

/** The tour's panel, if this stream is the tour's. */
export function joinTour(root, signal, stream, { log, rollBack }) {
  if (stream.name !== touring) return null;
  let step = 0;
  const place = el("span", { className: "soft" });
  const heading = el("h2", { tabIndex: -1, id: "tour-title" });
  const text = el("p");
  const button = (words, onclick, className = "") => el("button", { type: "button", className, onclick }, words);
  const undo = button("Roll back now", () => attempt(() => rollBack(stream.name, { before: stream.images()[BACK_TO]?.id ?? stream.images().at(-1).id }, false)));
  const back = button("Back", () => go(step - 1));
  const next = button("Next", () => (step + 1 < STEPS.length ? go(step + 1) : finish()), "main");
  const close = el("button", { type: "button", className: "quiet", "aria-label": "Close the tour", onclick: leave }, "×");
  const panel = el("aside", { id: "tour", "aria-labelledby": "tour-title" },
    el("div", { className: "tour-head" }, place, close), heading, text, el("p", { className: "actions" }, back, undo, next));

  function leave() {
    touring = null;
    panel.remove();
    document.body.classList.remove("touring");
    for (const marked of root.querySelectorAll(".spot")) marked.classList.remove("spot");
  }

  async function finish() {
    leave();
    location.hash = "#/";
    await attempt(() => send("DELETE", at(stream.name)));
  }

  function go(number) {
    step = number;
    for (const marked of root.querySelectorAll(".spot")) marked.classList.remove("spot");
    const section = root.querySelector(`#${STEPS[step][1]}`);
    section.classList.add("spot");
    if (STEPS[step][1] === "log-part") log.show("guard");
    section.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    place.textContent = `${step + 1} of ${STEPS.length}`;
    heading.textContent = STEPS[step][0];
    back.hidden = step === 0;
    undo.hidden = step + 1 < STEPS.length;
    next.textContent = step + 1 < STEPS.length ? "Next" : "Finish";
    update();
    heading.focus({ preventScroll: true });
  }

  function update() {
    if (stream.info) text.textContent = STEPS[step][2](stream, (line) => accuracy(stream, line));
  }

  root.append(panel);
  document.body.classList.add("touring");
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
  signal.addEventListener("abort", leave);
  go(0);
  return { update };
}
