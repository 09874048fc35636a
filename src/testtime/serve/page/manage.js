// Snapshots and going back; classes; fork, export, reset and delete.

import { at, getBlob, getJson, send } from "./api.js";
import { button, clock, el, keyed, many } from "./dom.js";
import { attempt, confirmed, notice, submits } from "./notices.js";

const open = (name) => { location.hash = `#/${encodeURIComponent(name)}`; };

/**
 * Goes back to `{snapshot}` or to `{before: image}`. With `keep`, the present goes on as a fork: going back drops what
 * is later, snapshots too.
 */
export async function rollBack(stream, to, keep) {
  const { name, info } = stream;
  const fork = { name: `${name.slice(0, 48)}-at-${info.events}` };
  const kept = keep ? await send("POST", at(name, "fork"), { json: fork }) : null;
  const { images } = await send("POST", at(name, "rollback"), { json: to });
  notice(`Back at ${many(images, "image")}.`, { action: kept && [`Open ${kept.name}`, () => open(kept.name)] });
}

function download(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function makeSnapshots(root, stream, signal) {
  const list = root.querySelector("#snapshots");
  const keep = root.querySelector("#keep");

  async function goBack(snapshot) {
    const text = "What was learned later is forgotten for good, and later snapshots with it.";
    const sure = keep.checked || (await confirmed("Roll back?", text, "Roll back"));
    if (sure) await rollBack(stream, { snapshot: snapshot.id }, keep.checked);
  }

  const row = (snapshot) => {
    const title = [snapshot.automatic && "automatic", snapshot.title].filter(Boolean).join(", ") || "snapshot";
    const place = many(snapshot.images, "image");
    const back = button("Roll back", () => attempt(() => goBack(snapshot)), {
      "aria-label": `Roll back to ${title} at ${place}`,
    });
    const drop = button("×", () => attempt(() => remove(snapshot)), {
      className: "quiet",
      "aria-label": `Delete the snapshot ${title} at ${place}`,
      hidden: snapshot.automatic, // the server rebuilds the stream from these
    });
    const words = el("p", {}, el("b", {}, title), el("small", {}, `${place}, ${clock(snapshot.time)}`));
    return el("li", {}, words, back, drop);
  };

  async function remove(snapshot) {
    await send("DELETE", at(stream.name, "snapshots", snapshot.id));
    await update();
  }

  async function update() {
    const { snapshots } = await getJson(at(stream.name, "snapshots"), { signal });
    const latest = snapshots.sort((one, other) => other.id - one.id);
    keyed(list, latest, (snapshot) => snapshot.id, row);
    root.querySelector("#no-snapshots").hidden = snapshots.length > 0;
  }

  submits(root.querySelector("#snapshot"), async (form) => {
    await send("POST", at(stream.name, "snapshots"), { json: { title: form.elements.title.value.trim() } });
    form.reset();
    await update();
  });
  return update;
}

/** Wires up both parts; returns what draws the classes, and what fetches the snapshots. */
export function makeManage(root, stream, signal) {
  const classes = root.querySelector("#classes");
  const press = (id, work) => root.querySelector(`#${id}`).addEventListener("click", () => attempt(work));
  const change = (json) => send("POST", at(stream.name, "classes"), { json });

  submits(root.querySelector("#add-class"), async (form) => {
    await change({ add: [form.elements.label.value.trim()] });
    form.reset();
  });
  submits(root.querySelector("#fork"), async (form) => {
    const made = await send("POST", at(stream.name, "fork"), { json: { name: form.elements.name.value } });
    open(made.name);
  });
  press("export", async () => download(await getBlob(at(stream.name, "state")), `${stream.name}.safetensors`));
  press("reset", async () => {
    const text = "The classifier starts again as if it had seen no image, and snapshots are deleted. Fork or export "
      + "the stream first to keep it.";
    if (await confirmed("Forget everything?", text, "Forget")) await send("POST", at(stream.name, "reset"));
  });
  press("delete", async () => {
    const text = `The stream ${stream.name}, what it learned, its log and its snapshots are deleted for good.`;
    if (!(await confirmed("Delete the stream?", text, "Delete"))) return;
    await send("DELETE", at(stream.name));
    location.hash = "#/";
  });

  async function removeClass(label) {
    const text = `Images are no longer classified as “${label}”, and what was learned of it is forgotten.`;
    if (await confirmed("Remove this class?", text, "Remove")) await change({ remove: [label] });
  }

  const chip = (label) => el("li", {}, el("span", {}, label), button("×", () => attempt(() => removeClass(label)), {
    className: "quiet",
    "aria-label": `Remove the class ${label}`,
  }));

  return {
    drawClasses: () => keyed(classes, stream.info.classes, (label) => label, chip),
    updateSnapshots: makeSnapshots(root, stream, signal),
  };
}
