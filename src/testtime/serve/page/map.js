// The map: text prototypes, visual prototypes and the latest images, projected to two dimensions by the server.

import { at, getJson } from "./api.js";
import { el, keyed, svg } from "./dom.js";

const EDGE = 28; // pixels around the outermost point
const LETTER = 7; // pixels of a letter of a name, on average
const LINE = 14;

const LEGEND = [
  ["ring", "a class's text prototype"],
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
    const apart = (other) => box[2] < other[0] || box[0] > other[2] || box[3] < other[1] || box[1] > other[3];
    const free = taken.every(apart);
    if (free) taken.push(box);
    return { label, name, x: left, y: y + 4, free };
  }).filter((entry) => entry.free);
}

const move = (node, x, y) => { node.style.transform = `translate(${x}px, ${y}px)`; };

export function makeMap(root, stream, signal) {
  const figure = root.querySelector("#map");
  const layers = Array.from({ length: 6 }, () => svg("g"));
  const [images, trails, links, rings, discs, names] = layers;
  const canvas = svg("svg", { role: "img" }, ...layers);
  const signs = LEGEND.map(([sign, words]) => el("li", {}, el("i", { className: sign }), words));
  figure.append(canvas, el("ul", { className: "legend" }, ...signs));
  let data = null;

  /** Shows items {key, kind, words, x, y} as circles. */
  function mark(group, items, radius) {
    keyed(group, items, (item) => item.key, () => svg("circle", { r: radius }, svg("title")), (node, item) => {
      node.setAttribute("class", item.kind);
      node.firstChild.textContent = item.words;
      move(node, item.x, item.y);
    });
  }

  /** Shows items {key, from, to} as lines. */
  function connect(group, items, kind) {
    keyed(group, items, (item) => item.key, () => svg("line", { x2: 1, class: kind }), (node, { from, to }) => {
      const [dx, dy] = [to.x - from.x, to.y - from.y];
      const turned = `rotate(${Math.atan2(dy, dx)}rad) scale(${Math.hypot(dx, dy)}, 1)`;
      node.style.transform = `translate(${from.x}px, ${from.y}px) ${turned}`;
    });
  }

  function render() {
    const width = figure.clientWidth;
    if (!width || !data) return;
    const height = Math.round(Math.min(width * 0.8, 460));
    canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const points = [
      ...data.classes.flatMap((entry) => [entry.prompt, entry.text, entry.visual].filter(Boolean)),
      ...data.images.map((image) => [image.x, image.y]),
    ];
    if (!points.length) return;
    const [across, down] = scales(points, width, height);
    const spot = ([x, y]) => ({ x: across(x), y: down(y) });
    const seen = data.classes.filter((entry) => entry.visual);
    mark(images, data.images.map(({ id, label, learned, x, y }) =>
      ({ key: id, kind: learned ? "speck learned" : "speck", words: `#${id}: ${label}`, ...spot([x, y]) })), 3);
    mark(rings, data.classes.map(({ label, text }) =>
      ({ key: label, kind: "ring", words: `${label}: text prototype`, ...spot(text) })), 4.5);
    mark(discs, seen.map(({ label, visual }) =>
      ({ key: label, kind: "disc", words: `${label}: visual prototype`, ...spot(visual) })), 5);
    const line = (label, from, to) => ({ key: label, from: spot(from), to: spot(to) });
    connect(trails, data.classes.map(({ label, prompt, text }) => line(label, prompt, text)), "trail");
    connect(links, seen.map(({ label, text, visual }) => line(label, text, visual)), "link");
    const anchors = data.classes.map(({ label, text, visual }) => ({ label, ...spot(visual ?? text) }));
    const written = (entry) => svg("text", {}, entry.name);
    keyed(names, placed(anchors, width), (entry) => entry.label, written, (node, { x, y }) => move(node, x, y));
    canvas.setAttribute("aria-label", `Map of ${data.classes.length} classes and ${data.images.length} images; `
      + `${seen.length} classes have a visual prototype`);
  }

  new ResizeObserver(render).observe(figure);
  return async function update() {
    data = await getJson(at(stream.name, "map"), { signal });
    render();
  };
}
