// Building the page: elements, keyed lists, numbers in words. Text is always inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, children) {
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An element with properties, attributes and listeners (names that start with "on"). */
export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  return fill(node, children);
}

/** A button that does one thing. */
export function button(content, onclick, options = {}) {
  return el("button", { type: "button", onclick, ...options }, content);
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return fill(node, children);
}

/** Shows `items` as children of `parent`. A child whose key stays is kept: it keeps focus, and moves smoothly. */
export function keyed(parent, items, keyOf, make, update = () => {}) {
  const old = new Map([...parent.children].map((node) => [node.key, node]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = old.get(key);
    old.delete(key);
    if (node) {
      if (node === place) place = place.nextElementSibling;
      else parent.insertBefore(node, place);
    } else {
      node = make(item);
      node.key = key;
      parent.insertBefore(node, place);
    }
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}

/** A function that runs `work` at once, and then at most once in `pause` milliseconds, never twice at a time. */
export function paced(work, pause, signal) {
  let waiting = false;
  let again = false;
  return async function run() {
    again = true;
    if (waiting) return;
    waiting = true;
    while (again && !signal.aborted) {
      again = false;
      await work();
      await new Promise((done) => setTimeout(done, pause));
    }
    waiting = false;
  };
}

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;
export const count = (number) => number.toLocaleString("en");
export const many = (number, word, plural = `${word}s`) => `${count(number)} ${number === 1 ? word : plural}`;

/** A time of the server, short: the clock today, otherwise the date too. */
export function clock(time) {
  const date = new Date(time);
  const today = date.toDateString() === new Date().toDateString();
  return date.toLocaleString([], today ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
}

/** Names of classes as typed: one per line, or with commas. */
export const listed = (text) => text.split(/[\n,]/).map((name) => name.trim()).filter(Boolean);
