// The page: which part of it is shown, by the address after "#/".

import { getJson, token } from "./api.js";
import { openHome } from "./home.js";
import { askForToken, attempt } from "./notices.js";
import { openStream } from "./stream.js";

const main = document.getElementById("main");
let leave = null;

function show() {
  if (location.hash && !location.hash.startsWith("#/")) return; // a link within the page
  const again = leave !== null;
  leave?.abort();
  leave = new AbortController();
  const name = decodeURIComponent(location.hash.slice(2));
  const template = document.getElementById(name ? "stream" : "home");
  main.replaceChildren(template.content.cloneNode(true));
  document.title = name ? `${name} · testtime` : "testtime";
  window.scrollTo(0, 0);
  if (again) main.focus({ preventScroll: true });
  (name ? openStream : openHome)(main, leave.signal, name);
}

async function about() {
  const info = await getJson("info");
  document.getElementById("about").textContent = `${info.encoder} on ${info.device}`;
}

const button = document.getElementById("token");
button.hidden = token.get() === null;
button.addEventListener("click", async () => {
  const given = await askForToken(false);
  if (given) {
    token.set(given);
    show();
  }
});
window.addEventListener("hashchange", show);
show();
attempt(about);
