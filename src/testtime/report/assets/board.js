// leaderboards: a click on a heading sorts, the form above filters all tables of its section
for (const form of document.querySelectorAll("form.filters")) {
  const section = form.closest("section"), tables = [...section.querySelectorAll("table.board")];
  const cells = form.querySelector("select"), name = form.querySelector("input[type=search]");
  const boxes = [...form.querySelectorAll("input[type=checkbox]")], told = form.querySelector("output");
  const value = (row, column) => {
    const text = row.children[column].dataset.value;
    return text === undefined ? null : column ? Number(text) : text.toLowerCase();
  };
  const filter = () => {
    const part = name.value.trim().toLowerCase(), hidden = boxes.filter((box) => box.checked).map((box) => box.value);
    let shown = 0, all = 0;
    for (const table of tables) {
      // with its title, where nothing ran in these cells
      table.closest("div:has(h3)").hidden = !table.tBodies[cells.selectedIndex].rows.length;
      [...table.tBodies].forEach((body, number) => {
        const chosen = number === cells.selectedIndex;
        body.style.display = chosen ? "table-row-group" : "none";
        for (const row of body.rows) {
          const heading = row.children[0], assumed = JSON.parse(heading.dataset.assumes);
          row.hidden = !heading.dataset.value.toLowerCase().includes(part) || assumed.some((each) => hidden.includes(each));
          all += chosen;
          shown += chosen && !row.hidden;
        }
      });
    }
    told.textContent = shown < all ? shown + " of " + all + " rows" : "";
  };
  for (const table of tables) {
    [...table.tHead.rows[0].children].forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        // numbers start with the largest, names with the first
        const before = heading.getAttribute("aria-sort"), first = column ? "descending" : "ascending";
        const order = before ? (before === "ascending" ? "descending" : "ascending") : first;
        for (const other of table.tHead.rows[0].children) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        for (const body of table.tBodies) {
          const rows = [...body.rows].map((row) => [value(row, column), row]);
          rows.sort(([a], [b]) => (a === null) - (b === null) || sign * ((a > b) - (a < b)));
          body.append(...rows.map(([, row]) => row));
        }
      });
    });
  }
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter(); // a browser may restore the choices of an earlier visit
}
