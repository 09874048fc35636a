// Snapshots and going back; classes; fork, export, reset and delete.

import { at, getBlob, getJson, send } from "./api.js";
import { clock, el, keyed, many } from "./dom.js";
import { attempt, confirmed, notice, submits } from "./notices.js";

/** Goes back to `{snapshot}` or to `{before: image}`; with `keep`, a snapshot first, so that it can be undone. */
export async function rollBack(name, to, keep) {
  const kept = keep ? await send("POST", at(name, "snapshots"), { json: { title: "before going back" } }) : null;
  const info = await send("POST", at(name, "rollback"), { json: to });
  const undo = kept && ["Undo", () => attempt(() => rollBack(name, { snapshot: kept.id }, false))];
  notice(`Back at ${many(info.images, "image")}.`, { action: undo });
  return info;
}

function download(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function makeSnapshots(root, stream, signal) {
  const list = root.querySelector("#snapshots");
  const keep = root.querySelector("#keep");

  const row = (snapshot) => {
    const title = snapshot.title || (snapshot.automatic ? "automatic" : "snapshot");
    return el("li", {}, el("p", {}, el("b", {}, title), el("small", {}, `${many(snapshot.images, "image")}, ${clock(snapshot.time)}`)),
      el("button", {
        type: "button",
        "aria-label": `Roll back to ${title} at ${many(snapshot.images, "image")}`,
        onclick: () => attempt(() => rollBack(stream.name, { snapshot: snapshot.id }, keep.checked)),
      }, "Roll back"),
      el("button", {
        type: "button",
        className: "quiet",
        "aria-label": `Delete the snapshot ${title} at ${many(snapshot.images, "image")}`,
        onclick: () => attempt(async () => {
          await send("DELETE", at(stream.name, "snapshots", snapshot.id));
          await update();
        }),
      }, "×"));
  };

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
    location.hash = `#/${encodeURIComponent(made.name)}`;
  });
  press("export", async () => download(await getBlob(at(stream.name, "state")), `${stream.name}.safetensors`));
  press("reset", async () => {
    const text = "The classifier starts again as if it had seen no image. Snapshots stay, so that you can go back.";
    if (await confirmed("Forget everything?", text, "Forget")) await send("POST", at(stream.name, "reset"));
  });
  press("delete", async () => {
    const text = `The stream ${stream.name}, what it learned, its log and its snapshots are deleted for good.`;
    if (!(await confirmed("Delete the stream?", text, "Delete"))) return;
    await send("DELETE", at(stream.name));
    location.hash = "#/";
  });

  async function remove(label) {
    const text = `Images are no longer classified as “${label}”, and what was learned of it is forgotten.`;
    if (await confirmed("Remove this class?", text, "Remove")) await change({ remove: [label] });
  }

  return {
    drawClasses: () => keyed(classes, stream.info.classes, (label) => label, (label) => el("li", {}, el("span", {}, label), el("button", {
      type: "button",
      className: "quiet",
      "aria-label": `Remove the class ${label}`,
      onclick: () => attempt(() => remove(label)),
    }, "×"))),
    updateSnapshots: makeSnapshots(root, stream, signal),
  };
}
