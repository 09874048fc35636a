// Small pictures of a stream's images: fetched when they come into view, since an <img> cannot send a token.

import { at, getBlob } from "./api.js";
import { el } from "./dom.js";

const KEPT = 600;
const SIDE = 192; // pixels of the shorter side of a picture made here

/** An object URL of a small copy of an image file. */
async function small(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.min(image.width, image.height));
  const canvas = el("canvas", { width: image.width * scale, height: image.height * scale });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  return URL.createObjectURL(await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.85)));
}

/** A function from an image's id to a picture of it, or to its number where the stream keeps no thumbnails. */
export function makePictures(stream, signal) {
  const known = new Map(); // id -> promise of an object URL, oldest first
  const wanted = new WeakMap(); // node -> id
  const inView = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      inView.unobserve(target);
      show(target, wanted.get(target));
      wanted.delete(target);
    }
  }, { rootMargin: "200px" });
  signal.addEventListener("abort", () => {
    inView.disconnect();
    for (const id of [...known.keys()]) drop(id);
  });

  function drop(id) {
    known.get(id)?.then(URL.revokeObjectURL, () => {});
    known.delete(id);
  }

  function keep(id, url) {
    known.set(id, url);
    if (known.size > KEPT) drop(known.keys().next().value);
  }

  async function show(node, id) {
    const path = at(stream.name, "images", id, "thumbnail");
    if (!known.has(id)) keep(id, getBlob(path, { signal }).then(URL.createObjectURL));
    try {
      node.replaceChildren(el("img", { src: await known.get(id), alt: "" }));
    } catch {
      // no thumbnail of this image: its number stays
    }
  }

  return {
    /** A picture of image `id`; null for an image that was only predicted on. */
    of(id) {
      const node = el("span", { className: "thumb" }, id === null ? "–" : `#${id}`);
      if (known.has(id)) show(node, id);
      else if (stream.info.thumbnails && id !== null) {
        wanted.set(node, id);
        inView.observe(node);
      }
      return node;
    },
    /** Shows a file that was just sent as the picture of its answer, whether or not the server keeps one. */
    remember(id, file) {
      const made = small(file);
      made.catch(() => {}); // a format that the browser does not read: the number stays
      keep(id, made);
    },
    forget: drop,
  };
}
