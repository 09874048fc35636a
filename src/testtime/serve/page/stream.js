// One stream: its parts, and the events that keep them up to date.

import { at, events, getJson, send } from "./api.js";
import { makeAnswers } from "./answers.js";
import { makeCourse } from "./course.js";
import { paced, percent } from "./dom.js";
import { makeIntake } from "./intake.js";
import { makeLog } from "./log.js";
import { makeManage, rollBack } from "./manage.js";
import { makeMap } from "./map.js";
import { attempt, notice } from "./notices.js";
import { makeOverview } from "./overview.js";
import { makeQueues } from "./queues.js";
import { makePictures } from "./thumbnails.js";
import { joinTour } from "./tour.js";

const FEW = 10; // images of which an accuracy says nothing
const ROWS = 4000; // entries of the log that the page remembers

/** What the page knows of a stream. */
function makeState(name) {
  const state = {
    name,
    info: null, // as the server gives it
    rows: new Map(), // entries of the log by id; those of answers seen here have their probabilities
    predicted: null, // an answer to an image that was only predicted on, if that is the latest
    accuracy: [], // along the tour's stream, whose labels are known
    filled: 0, // classes with images in their queue
  };
  state.sorted = () => [...state.rows.values()].sort((one, other) => one.id - other.id);
  state.images = () => state.sorted().filter((row) => row.kind === "image" && row.live);
  state.add = (answer) => {
    state.rows.set(answer.id, { kind: "image", live: true, time: new Date().toISOString(), ...answer });
    if (state.rows.size > ROWS) state.rows.delete(Math.min(...state.rows.keys()));
  };
  return state;
}

export function openStream(root, signal, name) {
  const part = (id) => root.querySelector(`#${id}`);
  const stream = makeState(name);
  const pictures = makePictures(stream, signal);
  const actions = {
    signal,
    choose(id) {
      answers.choose(id);
      part("answer-part").scrollIntoView({ block: "nearest" });
    },
    async unlearn(id) {
      await send("DELETE", at(name, "images", id));
      pictures.forget(id);
      notice(`Image #${id} is unlearned.`);
    },
    reload: () => soonReload(),
  };
  const overview = makeOverview(root, stream, (image) => rollBack(stream, { before: image }, true));
  const answers = makeAnswers(root, stream, pictures, actions);
  const course = makeCourse(root, stream);
  const queues = makeQueues(root, stream, pictures, signal);
  const map = makeMap(root, stream, signal);
  const log = makeLog(root, stream, pictures, actions);
  const manage = makeManage(root, stream, signal);
  const tour = joinTour(root, signal, stream, log);

  function speak() {
    const row = stream.predicted ?? stream.images().at(-1);
    if (!row) return;
    const words = `${row.image || "image"}: ${row.label}, ${percent(row.confidence)}; zero-shot ${row.zero_shot}.`;
    document.getElementById("spoken").textContent = words;
  }

  function setInfo(info) {
    stream.info = info;
    overview();
    manage.drawClasses();
  }

  /** Runs in the background, paced; the next event tries again, and a lost connection is shown. Not in a hidden tab. */
  const soon = (work, pause) => paced(async () => {
    if (document.hidden) return;
    try {
      await work();
    } catch (problem) {
      if (problem.name !== "AbortError" && !problem.status && !(problem instanceof TypeError)) throw problem;
    }
  }, pause, signal);
  const soonAnswers = soon(answers.update, 700);
  const soonSpeak = soon(speak, 3000);
  const soonCourse = soon(() => [course, log.update, tour.update].forEach((draw) => draw()), 500);
  const soonInfo = soon(async () => setInfo(await getJson(at(name), { signal })), 1000);
  const soonQueues = soon(queues, 1500);
  const soonMap = soon(map, 2500);
  const redraw = () => [soonAnswers, soonCourse, soonInfo, soonQueues, soonMap].forEach((run) => run());

  /** Reads everything again: at the start, after the connection was lost, and when the past has changed. */
  async function reload() {
    setInfo(await getJson(at(name), { signal }));
    await log.fetchNewest();
    redraw();
    await manage.updateSnapshots();
  }
  const soonReload = paced(() => attempt(reload), 500, signal);

  function take(answer) {
    stream.predicted = answer.id === null ? answer : null;
    if (answer.id !== null && !answer.repeated) stream.add(answer);
    redraw();
    soonSpeak();
  }

  function onAnswer(answer, file) {
    if (answer.id !== null) pictures.remember(answer.id, file);
    answers.choose(null);
    take(answer);
  }

  const handlers = {
    answer: ({ answer }) => {
      if (answer.id !== null && !stream.rows.has(answer.id)) take(answer);
    },
    stream: soonReload,
    tour: ({ images, truth, accuracy, zero_shot_accuracy: frozen }) => {
      const latest = stream.images().at(-1); // the tour sends one image at a time, and its answer came before
      if (latest) latest.truth = truth;
      if (images >= FEW) stream.accuracy.push({ x: images, values: [accuracy, frozen] });
      soonCourse();
    },
  };

  async function listen() {
    const connection = part("connection");
    const show = (words, on) => {
      connection.textContent = words;
      connection.classList.toggle("on", on);
    };
    for (let pause = 1; !signal.aborted; pause = Math.min(2 * pause, 15)) {
      const opened = () => {
        pause = 1;
        show("live", true);
        soonReload();
      };
      try {
        for await (const event of events(name, signal, opened)) handlers[event.type]?.(event);
      } catch (problem) {
        if (problem.name === "AbortError") return;
        const final = problem.status && problem.status < 500 && problem.status !== 429;
        if (final) return notice(problem.message, { error: true });
      }
      show("connection lost, trying again", false);
      await new Promise((done) => setTimeout(done, 1000 * pause));
    }
  }

  document.addEventListener("visibilitychange", () => stream.info && redraw(), { signal });
  makeIntake(root, stream, signal, onAnswer);
  listen();
}
