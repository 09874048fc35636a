// What the page says by the way, and what it asks.

import { el } from "./dom.js";

const SECONDS = 8;

/** Says something in a corner. Errors stay until closed; `action` is a [label, function] to offer with it. */
export function notice(text, { error = false, action = null } = {}) {
  const close = () => node.remove();
  const node = el(
    "div",
    { className: error ? "notice error" : "notice", role: error ? "alert" : "status" },
    el("span", {}, text),
    action && el("button", { type: "button", onclick: () => { close(); action[1](); } }, action[0]),
    el("button", { type: "button", className: "quiet", "aria-label": "Close", onclick: close }, "×"),
  );
  const notices = document.getElementById("notices");
  notices.append(node);
  while (notices.children.length > 4) notices.firstElementChild.remove();
  if (!error) setTimeout(close, 1000 * SECONDS);
}

/** Runs something that a person asked for; says so if it fails. Returns whether it worked. */
export async function attempt(work) {
  try {
    await work();
    return true;
  } catch (problem) {
    if (problem.name !== "AbortError") notice(problem.message, { error: true });
    return false;
  }
}

/** A form whose button is off while its work is under way. */
export function submits(form, work) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button:not([type=button])");
    button.disabled = true;
    await attempt(() => work(form));
    button.disabled = false;
  });
}

function opened(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue), { once: true }));
}

/** Whether a person agrees to something that cannot be undone. */
export async function confirmed(title, text, button) {
  const dialog = document.getElementById("confirm-dialog");
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector("#confirm-text").textContent = text;
  dialog.querySelector(".danger").textContent = button;
  return (await opened(dialog)) === "yes";
}

/** A token typed by a person, null if none is given. */
export async function askForToken(refused) {
  const dialog = document.getElementById("token-dialog");
  const field = dialog.querySelector("input");
  const words = refused ? "The server refused this token." : "This server wants a token.";
  dialog.querySelector("p span").textContent = words;
  field.value = "";
  document.getElementById("token").hidden = false;
  return (await opened(dialog)) === "save" && field.value.trim() ? field.value.trim() : null;
}
