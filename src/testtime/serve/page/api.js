// Calls of the service. A token, where the server wants one, is kept in this tab's sessionStorage only.

import { askForToken } from "./notices.js";

const BASE = new URL("v1/", new URL(".", location.href));
const TOKEN = "testtime-token";

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

class ApiError extends Error {
  constructor(message, status, retryAfter) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

let asking = null; // several calls that are refused at once ask once

/** The answer to a call below /v1/; ApiError with the server's own words if it is refused. */
async function call(path, { method = "GET", json, body, headers = {}, signal } = {}) {
  for (;;) {
    const sent = { ...headers };
    const used = token.get();
    if (used) sent.Authorization = `Bearer ${used}`;
    if (json !== undefined) sent["Content-Type"] = "application/json";
    const content = json === undefined ? body : JSON.stringify(json);
    const response = await fetch(new URL(path, BASE), { method, headers: sent, body: content, signal });
    if (response.ok) return response;
    if (response.status === 401) {
      asking ??= askForToken(used !== null).finally(() => { asking = null; });
      const given = token.get() === used ? await asking : token.get();
      if (given) {
        token.set(given);
        continue;
      }
    }
    throw await refusal(response);
  }
}

async function refusal(response) {
  let message = `The server answered ${response.status} ${response.statusText}.`;
  let answer = null;
  try {
    answer = await response.json();
    // a request in which no image could be answered has an error for each
    message = answer.error ?? answer.answers?.[0]?.error ?? message;
  } catch {
    // not JSON: from a proxy, not from the service
  }
  return new ApiError(message, response.status, Number(response.headers.get("Retry-After")) || null);
}

export const getJson = async (path, options) => (await call(path, options)).json();
export const getBlob = async (path, options) => (await call(path, options)).blob();

/** Sends and returns the answer, null if there is none to read (204). */
export async function send(method, path, options = {}) {
  const response = await call(path, { method, ...options });
  return response.status === 204 ? null : response.json();
}

/** The path of a stream, or of something below it. */
export const at = (name, ...parts) => ["streams", encodeURIComponent(name), ...parts].join("/");

/** The events of a stream as they come. By fetch, since EventSource cannot send a token. */
export async function* events(name, signal, onOpen) {
  const response = await call(at(name, "events"), { signal, headers: { Accept: "text/event-stream" } });
  onOpen();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (buffer + value).replaceAll("\r\n", "\n").split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5));
      if (data.length) yield JSON.parse(data.join("\n"));
    }
  }
}
