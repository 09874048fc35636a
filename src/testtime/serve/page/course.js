// How a stream went so far: disagreement and entropy, and the accuracy where the true labels are known.

import { changed } from "./answers.js";
import { makeChart } from "./charts.js";
import { percent } from "./dom.js";

const WINDOW = 50; // images that a running mean looks back on

/** The mean of the last `WINDOW` values at each place. */
function running(values) {
  let sum = 0;
  return values.map((value, index) => {
    sum += value - (index >= WINDOW ? values[index - WINDOW] : 0);
    return sum / Math.min(WINDOW, index + 1);
  });
}

export function makeCourse(root, stream) {
  const figure = (id) => root.querySelector(`#${id}`);
  const accuracy = makeChart(figure("accuracy"), {
    title: "Accuracy",
    note: "Share of right answers so far, by labels that no classifier sees.",
    lines: [{ name: "adapted", tone: "s1" }, { name: "zero-shot", tone: "s0" }],
    format: (value) => percent(value, 1),
    tick: (value) => percent(value),
    least: 0.1,
    zoom: true,
  });
  const disagreement = makeChart(figure("disagreement"), {
    title: "Disagreement",
    note: `Share of the last ${WINDOW} answers that differ from zero-shot.`,
    lines: [{ name: "disagreement", tone: "s1" }],
    format: (value) => percent(value),
    least: 0.1,
  });
  const entropy = makeChart(figure("entropy"), {
    title: "Entropy",
    note: `Mean over the last ${WINDOW} images, in nats: how unsure the answers are.`,
    lines: [{ name: "entropy", tone: "s3" }],
    format: (value) => value.toFixed(2),
    least: 0.1,
  });

  return function update() {
    const rows = stream.images();
    const curve = (values) => running(values).map((value, index) => ({ x: rows[index].id, values: [value] }));
    disagreement.draw(curve(rows.map((row) => (changed(row) ? 1 : 0))), stream.info.alarms);
    entropy.draw(curve(rows.map((row) => row.entropy)), stream.info.alarms);
    figure("accuracy").hidden = !stream.accuracy.length;
    accuracy.draw(stream.accuracy);
  };
}
