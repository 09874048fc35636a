// One stream: its parts, and the events that keep them up to date.

import { at, events, getJson, send } from "./api.js";
import { changed, makeAnswers } from "./answers.js";
import { makeChart, running } from "./charts.js";
import { clock, count, el, keyed, many, paced, percent } from "./dom.js";
import { makeIntake } from "./intake.js";
import { makeLog } from "./log.js";
import { makeManage, rollBack } from "./manage.js";
import { makeMap } from "./map.js";
import { attempt, notice } from "./notices.js";
import { makeQueues } from "./queues.js";
import { makePictures } from "./thumbnails.js";
import { joinTour } from "./tour.js";

const WINDOW = 50; // images that the running numbers look back on
const ROWS = 4000; // entries of the log that the page remembers

/** What the page knows of a stream; `rows` are entries of the log by id. */
function makeState(name) {
  const state = { name, info: null, rows: new Map(), predicted: null, accuracy: [], filled: 0 };
  state.sorted = () => [...state.rows.values()].sort((one, other) => one.id - other.id);
  state.images = () => state.sorted().filter((row) => row.kind === "image" && row.live);
  state.add = (answer) => {
    state.rows.set(answer.id, { kind: "image", live: true, time: new Date().toISOString(), ...answer });
    if (state.rows.size > ROWS) state.rows.delete(state.rows.keys().next().value);
  };
  return state;
}

function numbers(info) {
  const { feedback, refused } = info;
  const turned = Object.values(refused).reduce((sum, value) => sum + value, 0);
  const share = (part) => (info.images ? percent(part / info.images) : "–");
  return [
    ["Images", count(info.images), info.waiting ? `${info.waiting} waiting` : ""],
    ["Learned from", share(info.learned), turned ? `${count(turned)} refused` : ""],
    ["Answers changed", share(info.changed), `${count(info.changed)} differ from zero-shot`],
    ["Mean entropy", info.mean_entropy?.toFixed(2) ?? "–", "nats, latest images"],
    ...(feedback.labels ? [["Adapted right", `${feedback.right}/${feedback.labels}`, `zero-shot ${feedback.zero_shot_right}/${feedback.labels}`]] : []),
  ];
}

export function openStream(root, signal, name) {
  const part = (id) => root.querySelector(`#${id}`);
  const stream = makeState(name);
  const pictures = makePictures(stream, signal);
  const dismissed = new Set();
  const actions = {
    signal,
    choose(id) {
      answers.choose(id);
      part("answer-part").scrollIntoView({ block: "nearest" });
    },
    async unlearn(id) {
      await send("DELETE", at(name, "images", id));
      notice(`Image #${id} is unlearned.`);
    },
  };
  const answers = makeAnswers(root, stream, pictures, actions.unlearn);
  const log = makeLog(root, stream, pictures, actions);
  const manage = makeManage(root, stream, signal);
  const updateQueues = makeQueues(root, stream, pictures, signal);
  const updateMap = makeMap(root, stream, signal);
  const charts = {
    accuracy: makeChart(part("accuracy"), {
      title: "Accuracy", note: "Share of right answers so far, by labels that no classifier sees.", zoom: true, least: 0.1,
      lines: [{ name: "adapted", tone: "s1" }, { name: "zero-shot", tone: "s0" }], format: (value) => percent(value, 1), tick: (value) => percent(value),
    }),
    disagreement: makeChart(part("disagreement"), {
      title: "Disagreement", note: `Share of the last ${WINDOW} answers that differ from zero-shot.`, least: 0.1,
      lines: [{ name: "disagreement", tone: "s1" }], format: (value) => percent(value),
    }),
    entropy: makeChart(part("entropy"), {
      title: "Entropy", note: `Mean over the last ${WINDOW} images, in nats: how unsure the answers are.`, least: 0.1,
      lines: [{ name: "entropy", tone: "s3" }], format: (value) => value.toFixed(2),
    }),
  };
  const tour = joinTour(root, signal, stream, { log, rollBack });

  function banner(kind, text, ...buttons) {
    return { key: text, node: () => el("div", { className: `banner ${kind}` }, el("p", {}, text), ...buttons) };
  }

  function drawBanners() {
    const { alarms, read_only: readOnly } = stream.info;
    const alarm = alarms.at(-1);
    const button = (words, onclick) => el("button", { type: "button", onclick }, words);
    const shown = [];
    if (readOnly) shown.push(banner("warn", `Nothing can be learned now: ${readOnly}`));
    if (alarm !== undefined && !dismissed.has(alarm)) {
      shown.push(banner(
        "warn", `The stream has changed at image #${alarm}: its images look unlike those before.`,
        button("Roll back to before it", () => attempt(() => rollBack(name, { before: alarm }, true))),
        button("Dismiss", () => { dismissed.add(alarm); drawBanners(); }),
      ));
    }
    keyed(part("banners"), shown, (entry) => entry.key, (entry) => entry.node());
  }

  function drawInfo() {
    const { info } = stream;
    part("name").textContent = info.name;
    const guard = info.guard ? " with guard" : "";
    part("made-of").textContent = `${info.method}${guard}, ${many(info.classes.length, "class", "classes")}, since ${clock(info.created)}`;
    keyed(part("numbers"), numbers(info), ([label]) => label, ([label]) => el("li", {}, el("span", {}, label), el("b"), el("small")), (node, [, value, note]) => {
      node.children[1].textContent = value;
      node.children[2].textContent = note;
    });
    manage.drawClasses();
    drawBanners();
  }

  function drawCourse() {
    const rows = stream.images();
    const curve = (values) => running(values, WINDOW).map((value, index) => ({ x: rows[index].id, values: [value] }));
    charts.disagreement.draw(curve(rows.map((row) => (changed(row) ? 1 : 0))), stream.info.alarms);
    charts.entropy.draw(curve(rows.map((row) => row.entropy)), stream.info.alarms);
  }

  function speak() {
    const row = stream.predicted ?? stream.images().at(-1);
    if (row) document.getElementById("spoken").textContent = `${row.image || "image"}: ${row.label}, ${percent(row.confidence)}; zero-shot ${row.zero_shot}.`;
  }

  const quietly = (work) => async () => {
    try {
      await work();
    } catch {
      // the next event tries again; a server that is gone is shown by the connection
    }
  };
  const soonAnswers = paced(quietly(() => answers.update()), 700, signal);
  const soonSpeak = paced(quietly(speak), 3000, signal);
  const soonCourse = paced(quietly(() => { drawCourse(); log.update(); tour?.update(); }), 500, signal);
  const soonInfo = paced(quietly(async () => { stream.info = await getJson(at(name), { signal }); drawInfo(); }), 1000, signal);
  const soonQueues = paced(quietly(async () => { stream.filled = await updateQueues(); }), 1500, signal);
  const soonMap = paced(quietly(updateMap), 2500, signal);
  const soonSnapshots = paced(quietly(manage.updateSnapshots), 1000, signal);
  const learned = () => [soonAnswers, soonCourse, soonInfo, soonQueues, soonMap].forEach((run) => run());

  /** Reads everything again: at the start, after the connection was lost, and when the past has changed. */
  async function reload() {
    stream.info = await getJson(at(name), { signal });
    stream.rows.clear();
    await log.fetchOlder(signal);
    stream.predicted = null;
    drawInfo();
    answers.update();
    learned();
    soonSnapshots();
  }

  function onAnswer(answer, file) {
    answers.choose(null);
    if (file && answer.id !== null) pictures.remember(answer.id, file);
    if (answer.id === null) stream.predicted = answer;
    else take(answer);
    soonAnswers();
    soonSpeak();
  }

  function take(answer) {
    stream.predicted = null;
    if (!answer.repeated) stream.add(answer);
    learned();
  }

  const handlers = {
    answer: ({ answer }) => {
      if (answer.id === null || stream.rows.has(answer.id)) return;
      take(answer);
      soonSpeak();
    },
    stream: () => attempt(reload),
    tour: (event) => {
      stream.accuracy.push({ x: event.images, values: [event.accuracy, event.zero_shot_accuracy] });
      part("accuracy").hidden = false;
      charts.accuracy.draw(stream.accuracy);
      tour?.update();
    },
  };

  async function listen() {
    const connection = part("connection");
    for (let pause = 1; !signal.aborted; pause = Math.min(2 * pause, 15)) {
      try {
        const opened = () => {
          pause = 1;
          connection.textContent = "live";
          connection.classList.add("on");
        };
        for await (const event of events(name, signal, () => { opened(); attempt(reload); })) handlers[event.type]?.(event);
      } catch (problem) {
        if (problem.name === "AbortError") return;
        if (problem.status && problem.status < 500 && problem.status !== 429) return notice(problem.message, { error: true });
      }
      connection.textContent = "connection lost, trying again";
      connection.classList.remove("on");
      await new Promise((done) => setTimeout(done, 1000 * pause));
    }
  }

  makeIntake(root, stream, signal, onAnswer);
  listen();
}
