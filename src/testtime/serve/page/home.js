// The first look: make a stream, open one, import one, take the tour.

import { at, getJson, send } from "./api.js";
import { el, keyed, listed, many, percent } from "./dom.js";
import { attempt, submits } from "./notices.js";
import { startTour } from "./tour.js";

const go = (name) => { location.hash = `#/${encodeURIComponent(name)}`; };

function describe(stream) {
  const changed = stream.images ? `, ${percent(stream.changed / stream.images)} of the answers changed` : "";
  return `${stream.method}${stream.guard ? " with guard" : ""}, ${many(stream.classes.length, "class", "classes")}, `
    + `${many(stream.images, "image")}${changed}`;
}

async function create(form) {
  const data = new FormData(form);
  const template = data.get("template").trim();
  const made = await send("POST", "streams", {
    json: {
      name: data.get("name"),
      classes: listed(data.get("classes")),
      method: data.get("method"),
      guard: data.has("guard"),
      thumbnails: data.has("thumbnails"),
      views: Number(data.get("views")),
      seed: Number(data.get("seed")),
      ...(template ? { templates: [template] } : {}),
    },
  });
  go(made.name);
}

async function importState(form) {
  const data = new FormData(form);
  const made = await send("PUT", at(data.get("name"), "state"), {
    body: data.get("file"),
    headers: { "Content-Type": "application/octet-stream" },
  });
  go(made.name);
}

export function openHome(root, signal) {
  submits(root.querySelector("#new"), create);
  submits(root.querySelector("#import"), importState);
  const tour = root.querySelector("[data-tour]");
  tour.addEventListener("click", async () => {
    tour.disabled = true;
    await attempt(async () => go(await startTour()));
    tour.disabled = false;
  });
  attempt(async () => {
    const { methods } = await getJson("info", { signal });
    const choice = root.querySelector("[name=method]");
    choice.replaceChildren(...methods.map((name) => el("option", { value: name, selected: name === "dpe" }, name)));
  });
  attempt(async () => {
    const { streams } = await getJson("streams", { signal });
    const row = (stream) => {
      const link = el("a", { href: `#/${encodeURIComponent(stream.name)}` }, stream.name);
      return el("li", {}, link, el("small", {}, describe(stream)));
    };
    keyed(root.querySelector("#streams"), streams, (stream) => stream.name, row);
    root.querySelector("#no-streams").hidden = streams.length > 0;
  });
}
