// a queue map: shows the nearest point's image and text, and highlights its class in every map of the section
for (const svg of document.querySelectorAll("svg[data-map]")) {
  const plot = svg.parentNode, tip = document.createElement("div"), text = document.createElement("div");
  const thumbnail = document.createElement("span"), title = svg.querySelector("title");
  const points = [...svg.querySelectorAll(".point")];
  svg.setAttribute("aria-label", title.textContent + ". " + svg.querySelector("desc").textContent);
  title.remove();
  tip.className = "tip card-of-image";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  tip.append(thumbnail, text);
  plot.append(tip);
  const highlight = (label) => {
    for (const other of svg.closest("section").querySelectorAll("svg[data-map]")) {
      other.classList.toggle("dim", label !== null);
      for (const point of other.querySelectorAll(".point")) point.classList.toggle("on", point.dataset.label === label);
    }
  };
  const leave = () => {
    tip.hidden = true;
    highlight(null);
  };
  const move = (event) => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / scale, y = (event.clientY - box.top) / scale;
    let best = null, least = 16;
    for (const point of points) {
      const distance = Math.hypot(point.dataset.x - x, point.dataset.y - y);
      if (distance < least) [best, least] = [point, distance];
    }
    if (!best) return leave();
    highlight(best.dataset.label);
    thumbnail.className = "thumb " + best.dataset.thumbnail;
    thumbnail.hidden = !best.dataset.thumbnail;
    text.replaceChildren(...best.dataset.text.split("\n").map((line) => {
      const node = document.createElement("div");
      node.textContent = line;
      return node;
    }));
    tip.hidden = false;
    tip.style.left = "0"; // before measuring: at the right edge the box would be squeezed
    const left = best.dataset.x * scale + 14, top = best.dataset.y * scale + 14;
    tip.style.left = Math.max(0, Math.min(left, box.width - tip.offsetWidth)) + "px";
    tip.style.top = (top + tip.offsetHeight > box.height ? top - 28 - tip.offsetHeight : top) + "px";
  };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
}
