// The map: text prototypes, visual prototypes and the latest images, projected to two dimensions by the server.

import { at, getJson } from "./api.js";
import { el, keyed, svg } from "./dom.js";

const EDGE = 28; // pixels around the outermost point
const LETTER = 7; // pixels of a letter of a name, on average
const LINE = 14;

const LEGEND = [
  ["ring", "a class's sentence"],
  ["disc", "its visual prototype"],
  ["speck learned", "image, learned from"],
  ["speck", "image, not learned from"],
];

function scales(points, width, height) {
  const side = (values, size) => {
    const low = Math.min(...values);
    const span = Math.max(1e-9, Math.max(...values) - low);
    return (value) => EDGE + ((value - low) / span) * (size - 2 * EDGE);
  };
  return [side(points.map((point) => point[0]), width), side(points.map((point) => point[1]), height)];
}

/** Places for names beside their points, leaving out those that would cover another. */
function placed(classes, width) {
  const taken = [];
  return classes.map(({ label, x, y }) => {
    const name = label.length > 18 ? `${label.slice(0, 17)}…` : label;
    const wide = name.length * LETTER;
    const left = x + 10 + wide > width ? x - 10 - wide : x + 10;
    const box = [left, y - LINE / 2, left + wide, y + LINE / 2];
    const free = taken.every((other) => box[2] < other[0] || box[0] > other[2] || box[3] < other[1] || box[1] > other[3]);
    if (free) taken.push(box);
    return { label, name, x: left, y: y + 4, free };
  }).filter((entry) => entry.free);
}

const move = (node, x, y) => { node.style.transform = `translate(${x}px, ${y}px)`; };

export function makeMap(root, stream, signal) {
  const figure = root.querySelector("#map");
  const [links, images, rings, discs, names] = Array.from({ length: 5 }, () => svg("g"));
  const canvas = svg("svg", { role: "img" }, images, links, rings, discs, names);
  const legend = el("ul", { className: "legend" }, ...LEGEND.map(([mark, words]) => el("li", {}, el("i", { className: mark }), words)));
  figure.append(canvas, legend);
  let data = null;

  function mark(group, items, keyOf, kind, radius, words) {
    keyed(group, items, keyOf, () => svg("circle", { r: radius }, svg("title")), (node, item) => {
      node.setAttribute("class", kind(item));
      node.firstChild.textContent = words(item);
      move(node, item.x, item.y);
    });
  }

  function render() {
    const width = figure.clientWidth;
    if (!width || !data) return;
    const height = Math.round(Math.min(width * 0.8, 460));
    canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const points = [
      ...data.classes.flatMap((entry) => [entry.text, entry.visual].filter(Boolean)),
      ...data.images.map((image) => [image.x, image.y]),
    ];
    if (!points.length) return;
    const [across, down] = scales(points, width, height);
    const spot = (label, [x, y]) => ({ label, x: across(x), y: down(y) });
    const texts = data.classes.map((entry) => spot(entry.label, entry.text));
    const seen = data.classes.filter((entry) => entry.visual);
    const visuals = seen.map((entry) => spot(entry.label, entry.visual));
    const shots = data.images.map((image) => ({ ...image, x: across(image.x), y: down(image.y) }));
    mark(images, shots, (image) => image.id, (image) => (image.learned ? "speck learned" : "speck"), 3, (image) => `#${image.id}: ${image.label}`);
    mark(rings, texts, (entry) => entry.label, () => "ring", 4.5, (entry) => `${entry.label}: sentence`);
    mark(discs, visuals, (entry) => entry.label, () => "disc", 5, (entry) => `${entry.label}: visual prototype`);
    keyed(links, seen, (entry) => entry.label, () => svg("line", { x2: 1 }), (node, entry) => {
      const [from, to] = [spot("", entry.text), spot("", entry.visual)];
      const [dx, dy] = [to.x - from.x, to.y - from.y];
      node.style.transform = `translate(${from.x}px, ${from.y}px) rotate(${Math.atan2(dy, dx)}rad) scale(${Math.hypot(dx, dy)}, 1)`;
    });
    const anchors = data.classes.map((entry) => spot(entry.label, entry.visual ?? entry.text));
    keyed(names, placed(anchors, width), (entry) => entry.label, (entry) => svg("text", {}, entry.name), (node, entry) => move(node, entry.x, entry.y));
    canvas.setAttribute("aria-label", `Map of ${data.classes.length} classes, ${seen.length} with a visual prototype, and ${shots.length} images`);
  }

  new ResizeObserver(render).observe(figure);
  return async function update() {
    data = await getJson(at(stream.name, "map"), { signal });
    render();
  };
}
