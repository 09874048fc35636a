// The chosen answer, adapted beside zero-shot, and the latest ones to choose from.

import { at, send } from "./api.js";
import { button, el, keyed, percent } from "./dom.js";
import { attempt, notice, submits } from "./notices.js";

const RECENT = 8;
const TILE = 80; // pixels of width for one of them, with the gap between two

function bars(list, probabilities) {
  keyed(list, probabilities, (entry) => entry.label, (entry) =>
    el("li", {}, el("span", {}, entry.label), el("i"), el("b")), (node, entry) => {
    node.children[1].style.setProperty("--share", entry.probability);
    node.children[2].textContent = percent(entry.probability, 1);
  });
}

/** What became of an image, in a few words. */
export function fate(row) {
  if (row.live === false) return "no longer part of what was learned";
  return row.learned ? "learned from" : `not learned from${row.reason ? ` (${row.reason})` : ""}`;
}

const nameOf = (row) => row.image || (row.id === null ? "image" : `image #${row.id}`);

export const changed = (row) => row.label !== row.zero_shot;

export function makeAnswers(root, stream, pictures, { unlearn, reload }) {
  const part = (id) => root.querySelector(`#${id}`);
  const [ours, frozen] = root.querySelectorAll(".versus > div");
  const choice = part("feedback").elements.label;
  let chosen = null; // an id, if a person has chosen one; otherwise the latest is shown
  let shown = null;

  function side(node, label, confidence, probabilities) {
    node.querySelector(".verdict").replaceChildren(el("b", {}, label), el("span", {}, percent(confidence, 1)));
    bars(node.querySelector(".bars"), probabilities);
  }

  function show(row) {
    part("answer").hidden = !row;
    if (!row) return;
    if (shown?.id !== row.id) {
      part("picture").replaceChildren(pictures.of(row.id));
      choice.value = row.label;
    }
    shown = row;
    part("answer-name").textContent = nameOf(row);
    const alarm = row.drift && "alarm: the stream has changed";
    const parts = [row.truth && `in truth ${row.truth}`, fate(row), alarm, row.repeated && "sent before"];
    part("answer-state").textContent = parts.filter(Boolean).join("; ");
    side(ours, row.label, row.confidence, row.probabilities ?? [{ label: row.label, probability: row.confidence }]);
    // entries of the log have no confidence of the frozen classifier
    const sure = row.zero_shot_confidence;
    side(frozen, row.zero_shot, sure ?? 0, sure === undefined ? [] : [{ label: row.zero_shot, probability: sure }]);
    frozen.querySelector(".verdict span").hidden = sure === undefined;
    part("verdicts").textContent = changed(row) ? "Adapting changed this answer." : "The same answer.";
    part("answer").classList.toggle("changed", changed(row));
    part("feedback").hidden = row.id === null || row.live === false;
  }

  function update() {
    const images = stream.images();
    const room = Math.min(RECENT, Math.floor((part("recent").clientWidth + 8) / TILE));
    const latest = room > 0 ? images.slice(-room).reverse() : [];
    const names = stream.info.classes;
    if (choice.options.length !== names.length || names.some((name, index) => choice.options[index].value !== name)) {
      choice.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    }
    if (!stream.rows.get(chosen)?.label) chosen = null; // it was unlearned
    part("latest").hidden = chosen === null;
    show(chosen === null ? stream.predicted ?? images.at(-1) : stream.rows.get(chosen));
    const tile = (row) => {
      const press = button(pictures.of(row.id), () => choose(row.id));
      press.append(el("span", {}, row.label));
      return el("li", {}, press);
    };
    keyed(part("recent"), latest, (row) => row.id, tile, (node, row) => {
      const press = node.firstElementChild;
      node.classList.toggle("changed", changed(row));
      press.setAttribute("aria-pressed", String(chosen === row.id));
      press.title = `${nameOf(row)}: ${row.label}, zero-shot ${row.zero_shot}; ${fate(row)}`;
    });
  }

  /** Shows this image, or the latest with null, until another is chosen or sent. */
  function choose(id) {
    chosen = id;
    update();
  }

  // whoever is about to judge an image must not find another one there when they press the button
  for (const touched of ["focusin", "pointerdown"]) part("feedback").addEventListener(touched, () => choose(shown.id));
  part("latest").addEventListener("click", () => choose(null));

  submits(part("feedback"), async () => {
    const told = await send("POST", at(stream.name, "labels"), { json: { image: shown.id, label: choice.value } });
    const judged = (right) => (right ? "right" : "wrong");
    notice(`Noted: adapted was ${judged(told.right)}, zero-shot ${judged(told.zero_shot_right)}.`
      + (told.used ? " The guard takes it into account." : ""));
    reload();
  });
  part("unlearn").addEventListener("click", () => attempt(() => unlearn(shown.id)));
  return {
    update,
    choose,
  };
}
