// the browser would show a title as a tooltip over ours, so it becomes the aria-label
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const d = JSON.parse(svg.dataset.chart), plot = svg.parentNode, tip = document.createElement("div");
  const title = svg.querySelector("title");
  svg.setAttribute("aria-label", title.textContent + ". " + svg.querySelector("desc").textContent);
  title.remove();
  const make = (kind, attributes) => {
    const node = document.createElementNS(svg.namespaceURI, kind);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    node.style.display = "none";
    return svg.appendChild(node);
  };
  const cross = make("line", { class: "cross", y1: d.top, y2: d.bottom });
  const dots = d.curves.map(([, style]) => make("circle", { class: "dot " + style, r: 4 }));
  const base = d.curves.find((curve) => curve[3])[2];
  const add = (parent, kind, className, text) => {
    const node = parent.appendChild(document.createElement(kind));
    node.className = className;
    node.textContent = text;
    return node;
  };
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  plot.append(tip);
  const show = (visible) => {
    tip.hidden = !visible;
    for (const node of [cross, ...dots]) node.style.display = visible ? "" : "none";
  };
  svg.addEventListener("pointerleave", () => show(false));
  const move = (event) => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const at = ((event.clientX - box.left) / scale - d.left) / (d.right - d.left) * d.images;
    if (at < -0.03 * d.images || at > 1.03 * d.images) return show(false);
    let k = 0;
    for (let i = 1; i < d.seen.length; i++) if (Math.abs(d.seen[i] - at) < Math.abs(d.seen[k] - at)) k = i;
    const x = d.left + (d.right - d.left) * d.seen[k] / d.images;
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    show(true);
    tip.replaceChildren();
    add(tip, "b", "", d.seen[k].toLocaleString("en") + (d.seen[k] == 1 ? " image" : " images"));
    d.curves.forEach(([name, style, values, baseline], i) => {
      const y = d.bottom - (d.bottom - d.top) * (values[k] / 100 - d.low) / (d.high - d.low);
      dots[i].setAttribute("cx", x);
      dots[i].setAttribute("cy", y);
      if (y < d.top - 1 || y > d.bottom + 1) dots[i].style.display = "none";
      const row = add(tip, "div", style, ""), gain = (values[k] - base[k]) / 100;
      add(row, "span", "name", name);
      add(row, "span", "", (values[k] / 100).toFixed(1) + "%");
      const sign = Math.abs(gain) < 0.05 ? "" : gain < 0 ? "\u2212" : "+";
      add(row, "em", "", baseline ? "" : sign + Math.abs(gain).toFixed(1));
    });
    // on a phone there is no space beside the crosshair: show it below the chart
    const beside = box.width > 520, right = x > (d.left + d.right) / 2;
    const left = right ? x * scale - 12 - tip.offsetWidth : x * scale + 12;
    tip.style.left = (beside ? Math.max(0, left) : 0) + "px";
    tip.style.top = beside ? "" : box.height + "px";
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
}
