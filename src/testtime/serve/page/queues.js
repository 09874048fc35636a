// Each class's queue: the images that its visual prototype is made of.

import { at, getJson } from "./api.js";
import { el, keyed, many } from "./dom.js";

export function makeQueues(root, stream, pictures, signal) {
  const list = root.querySelector("#queues");
  const note = root.querySelector("#no-queues");

  function slots(node, held) {
    const keyOf = (slot) => slot.image ?? `unknown ${held.indexOf(slot)}`;
    keyed(node, held, keyOf, (slot) => pictures.of(slot.image), (picture, { image, entropy }) => {
      picture.title = `${image === null ? "an image" : `image #${image}`}, entropy ${entropy.toFixed(3)}`;
    });
  }

  return async function update() {
    const { classes } = await getJson(at(stream.name, "queues"), { signal });
    const filled = classes.filter((entry) => entry.slots.length);
    list.hidden = !filled.length;
    list.classList.toggle("pictures", stream.info.thumbnails);
    const row = (entry) => el("div", {}, el("dt", {}, entry.label), el("dd"));
    keyed(list, filled, (entry) => entry.label, row, (node, entry) => slots(node.lastElementChild, entry.slots));
    const missing = `${many(classes.length - filled.length, "class", "classes")} without images yet.`;
    note.hidden = filled.length === classes.length;
    note.textContent = filled.length ? missing : "Nothing yet. Methods without a memory of images keep no queues.";
    stream.filled = filled.length;
  };
}
