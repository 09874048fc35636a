// The head of a stream's page: what it is made of, its numbers, and what needs attention.

import { button, clock, count, el, keyed, many, percent } from "./dom.js";
import { attempt } from "./notices.js";

function numbers(info) {
  const { feedback } = info;
  const refused = Object.values(info.refused).reduce((sum, value) => sum + value, 0);
  const share = (part) => (info.images ? percent(part / info.images) : "–");
  const right = (found) => `${count(found)}/${count(feedback.labels)}`;
  const cards = [
    ["Images", count(info.images), info.waiting ? `${count(info.waiting)} waiting` : ""],
    ["Learned from", share(info.learned), refused ? `not from ${count(refused)}` : ""],
    ["Answers changed", share(info.changed), info.changed ? `${count(info.changed)} unlike zero-shot` : ""],
    ["Mean entropy", info.images ? info.mean_entropy.toFixed(2) : "–", info.images ? "nats, latest images" : ""],
  ];
  if (!feedback.labels) return cards;
  return [...cards, ["Adapted right", right(feedback.right), `zero-shot ${right(feedback.zero_shot_right)}`]];
}

/** Draws the head of the page from `stream.info`; `goBack` is asked to go back to before an image. */
export function makeOverview(root, stream, goBack) {
  const part = (id) => root.querySelector(`#${id}`);
  const dismissed = new Set();

  function warnings() {
    const { alarms, read_only: readOnly } = stream.info;
    const alarm = alarms.at(-1);
    const found = readOnly ? [[`Nothing can be learned now: ${readOnly}`]] : [];
    if (alarm === undefined || dismissed.has(alarm)) return found;
    return [...found, [
      `The stream has changed at image #${alarm}: its images look unlike those before.`,
      button("Roll back to before it", () => attempt(() => goBack(alarm))),
      button("Dismiss", () => { dismissed.add(alarm); update(); }),
    ]];
  }

  function update() {
    const { info } = stream;
    part("name").textContent = info.name;
    part("made-of").textContent = [
      info.guard ? `${info.method} with guard` : info.method,
      many(info.classes.length, "class", "classes"),
      `since ${clock(info.created)}`,
    ].join(", ");
    const card = ([label]) => el("li", {}, el("span", {}, label), el("b"), el("small"));
    keyed(part("numbers"), numbers(info), ([label]) => label, card, (node, [, value, note]) => {
      node.children[1].textContent = value;
      node.children[2].textContent = note;
    });
    keyed(part("banners"), warnings(), ([text]) => text, ([text, ...buttons]) =>
      el("div", { className: "banner" }, el("p", {}, text), ...buttons));
  }

  return update;
}
