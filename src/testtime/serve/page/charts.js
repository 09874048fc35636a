// Line charts along a stream, drawn at their real size so that text stays legible on a phone.

import { el, svg } from "./dom.js";

const HEIGHT = 150;
const INSIDE = { left: 40, right: 8, top: 8, bottom: 22 };

/** The lowest of 1, 2, 2.5, 5 times a power of ten that is not below `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
}

/**
 * A chart in a figure. `lines` are {name, tone}; `format` writes a value, `tick` one on the axis; `least` is the
 * smallest span of the axis; `zoom` lets it start above zero. `draw` gets points {x, values} and marks at x.
 */
export function makeChart(figure, { title, note, lines, format, tick = format, least, zoom = false }) {
  const named = lines.length > 1;
  const readings = lines.map(({ name, tone }) => el("span", { className: tone }, named ? name : "", el("b")));
  const place = el("span", { className: "soft" });
  const caption = el("figcaption", {}, el("span", { className: "chart-title" }, title), ...readings, place);
  const canvas = svg("svg", { height: HEIGHT, role: "img" });
  figure.replaceChildren(caption, canvas, el("p", { className: "soft" }, note));
  let points = [];
  let marks = [];

  function read(point) {
    readings.forEach((node, index) => { node.lastChild.textContent = point ? format(point.values[index]) : ""; });
    place.textContent = point && point !== points.at(-1) ? `at #${point.x}` : "";
  }

  function scales(width) {
    const values = points.flatMap((point) => point.values);
    const most = Math.max(...values);
    const low = zoom ? Math.floor(Math.min(...values) * 10) / 10 : 0;
    const high = zoom ? Math.max(low + least, Math.ceil(most * 10) / 10) : roundUp(Math.max(least, most));
    const first = points[0].x;
    const span = Math.max(1, points.at(-1).x - first);
    const { left, right, top, bottom } = INSIDE;
    return {
      low, high,
      x: (value) => left + ((value - first) / span) * (width - left - right),
      y: (value) => top + (1 - (value - low) / (high - low)) * (HEIGHT - top - bottom),
    };
  }

  function render() {
    const width = figure.clientWidth;
    if (!width) return;
    canvas.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    if (!points.length) {
      canvas.replaceChildren(svg("text", { x: width / 2, y: HEIGHT / 2, class: "middle tick" }, "no images yet"));
      canvas.setAttribute("aria-label", `${title}: no images yet`);
      return read(null);
    }
    const { low, high, x, y } = scales(width);
    const [left, right] = [INSIDE.left, width - INSIDE.right];
    const ticks = [low, (low + high) / 2, high].flatMap((value) => [
      svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: value === low ? "base" : "grid" }),
      svg("text", { x: left - 6, y: y(value) + 4, class: "end tick" }, tick(value)),
    ]);
    const ends = points.length < 2 ? [] : [
      svg("text", { x: left, y: HEIGHT - 4, class: "tick" }, `#${points[0].x}`),
      svg("text", { x: right, y: HEIGHT - 4, class: "end tick" }, `#${points.at(-1).x}`),
    ];
    const shown = marks.filter((mark) => mark >= points[0].x && mark <= points.at(-1).x);
    const upright = { y1: INSIDE.top, y2: HEIGHT - INSIDE.bottom, class: "alarm" };
    const alarms = shown.map((mark) =>
      svg("line", { x1: x(mark), x2: x(mark), ...upright }, svg("title", {}, `Alarm at #${mark}`)));
    const stride = Math.ceil(points.length / width);
    const drawn = points.filter((_, index) => index % stride === 0 || index === points.length - 1);
    const path = (index) => drawn.map((point) => `${x(point.x)},${y(point.values[index])}`).join(" ");
    const curves = lines.flatMap(({ tone }, index) => [
      svg("polyline", { class: `line ${tone}`, points: path(index) }),
      svg("circle", { class: `dot ${tone}`, r: 3.5, cx: x(points.at(-1).x), cy: y(points.at(-1).values[index]) }),
    ]);
    canvas.replaceChildren(...ticks, ...ends, ...alarms, ...curves);
    const last = lines.map(({ name }, index) => `${name} ${format(points.at(-1).values[index])}`).join(", ");
    canvas.setAttribute("aria-label", `${title}: ${last} at image ${points.at(-1).x}`);
    read(points.at(-1));
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!points.length) return;
    const { x } = scales(figure.clientWidth);
    const at = event.clientX - canvas.getBoundingClientRect().left;
    read(points.reduce((best, point) => (Math.abs(x(point.x) - at) < Math.abs(x(best.x) - at) ? point : best)));
  });
  canvas.addEventListener("pointerleave", () => read(points.at(-1)));
  new ResizeObserver(render).observe(figure);
  return {
    draw(newPoints, newMarks = []) {
      points = newPoints;
      marks = newMarks;
      render();
    },
  };
}
