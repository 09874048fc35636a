// Each class's queue: the images that its visual prototype is made of.

import { at, getJson } from "./api.js";
import { el, keyed, many } from "./dom.js";

export function makeQueues(root, stream, pictures, signal) {
  const list = root.querySelector("#queues");
  const note = root.querySelector("#no-queues");

  function slots(node, held) {
    keyed(node, held, (slot) => slot.image ?? `rank ${held.indexOf(slot)}`, (slot) => pictures.of(slot.image), (picture, slot) => {
      picture.title = `${slot.image === null ? "an image" : `image #${slot.image}`}, entropy ${slot.entropy.toFixed(3)}`;
    });
  }

  /** Fetches the queues, draws them, and returns how many classes have some. */
  return async function update() {
    const { classes } = await getJson(at(stream.name, "queues"), { signal });
    const filled = classes.filter((entry) => entry.slots.length);
    list.hidden = !filled.length;
    list.classList.toggle("pictures", stream.info.thumbnails);
    keyed(list, filled, (entry) => entry.label, (entry) => el("div", {}, el("dt", {}, entry.label), el("dd")), (node, entry) =>
      slots(node.lastElementChild, entry.slots));
    const empty = classes.length - filled.length;
    note.hidden = !empty && classes.length > 0;
    note.textContent = classes.length ? `${many(empty, "class", "classes")} without images yet.` : `${stream.info.method} keeps no queues.`;
    return filled.length;
  };
}
