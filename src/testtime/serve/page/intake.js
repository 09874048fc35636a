// Sending images: dropped, chosen, pasted, or from the camera.

import { at, send } from "./api.js";
import { el, many } from "./dom.js";
import { notice } from "./notices.js";

const FRAME_PAUSE = 1000; // milliseconds between two frames of the camera
const FRAME_SIDE = 640; // pixels of a frame's longer side: more than any encoder looks at
const TRIES = 5;

const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

/** A key by which the server knows an image that is sent again, so that it is learned from once. */
function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function sendImage(name, file, learn, signal) {
  const key = newKey();
  for (let tried = 1; ; tried += 1) {
    const body = new FormData();
    body.append("file", file, file.name);
    try {
      const path = at(name, `images?learn=${learn}&top=5`);
      const { answers } = await send("POST", path, { body, signal, headers: { "Idempotency-Key": key } });
      return answers[0];
    } catch (problem) {
      const unreached = problem instanceof TypeError; // what fetch throws without a connection
      const later = unreached || problem.status === 429 || problem.status === 503;
      if (!later || tried === TRIES) throw problem;
      await wait(1000 * (problem.retryAfter ?? tried));
    }
  }
}

/** Wires up the part of the page that sends images; `onAnswer` gets each answer with its file. */
export function makeIntake(root, stream, signal, onAnswer) {
  const part = (id) => root.querySelector(`#${id}`);
  const [learn, files, sending, failed, drop] = ["learn", "files", "sending", "failed", "drop"].map(part);
  const queue = [];
  let busy = false;

  function fail(file, message) {
    const row = el("li", { className: "failed" }, el("b", {}, file.name), el("small", {}, message));
    failed.prepend(row);
    while (failed.children.length > 5) failed.lastElementChild.remove();
  }

  async function work() {
    if (busy) return;
    busy = true;
    while (queue.length && !signal.aborted) {
      sending.textContent = queue.length > 1 ? `${many(queue.length, "image")} to send` : "";
      const { file, learns } = queue.shift();
      try {
        const answer = await sendImage(stream.name, file, learns, signal);
        if (answer.error) fail(file, answer.error);
        else onAnswer(answer, file);
      } catch (problem) {
        if (problem.name !== "AbortError") fail(file, problem.message);
      }
    }
    sending.textContent = "";
    busy = false;
  }

  function add(found) {
    failed.replaceChildren();
    for (const file of found) queue.push({ file, learns: learn.checked });
    work();
  }

  part("choose").addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    add([...files.files]);
    files.value = "";
  });
  document.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) add([...event.clipboardData.files]);
  }, { signal });
  // anywhere on the page: a file dropped beside the field would otherwise replace the page
  window.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  }, { signal });
  window.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) drop.classList.remove("over");
  }, { signal });
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    add([...event.dataTransfer.files]);
  }, { signal });
  makeCamera(part("camera"), part("video"), signal, (frame) => busy || add([frame]));
}

function makeCamera(button, video, signal, onFrame) {
  let source = null;
  const canvas = el("canvas");

  function stop() {
    source?.getTracks().forEach((track) => track.stop());
    source = null;
    video.srcObject = null;
    video.hidden = true;
    button.textContent = "Use the camera";
  }

  async function start() {
    if (!navigator.mediaDevices) throw new Error("The camera needs a page over https, or on localhost.");
    source = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    if (signal.aborted) return stop();
    button.textContent = "Stop the camera";
    video.hidden = false;
    video.srcObject = source;
    await video.play();
    frames(source);
  }

  async function frames(mine) {
    for (let number = 1; source === mine; number += 1) {
      const scale = Math.min(1, FRAME_SIDE / Math.max(video.videoWidth, video.videoHeight));
      Object.assign(canvas, { width: video.videoWidth * scale, height: video.videoHeight * scale });
      canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
      const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
      if (blob && source === mine) onFrame(new File([blob], `camera-${number}.jpg`, { type: "image/jpeg" }));
      await wait(FRAME_PAUSE);
    }
  }

  button.addEventListener("click", async () => {
    if (source) return stop();
    try {
      await start();
    } catch (problem) {
      stop();
      notice(`No camera: ${problem.message}`, { error: true });
    }
  });
  signal.addEventListener("abort", stop);
}
