// Tables sort by the column whose title is clicked: numbers by their full value, absent ones last.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const titles = [...table.tHead.rows[0].cells];
  if (body.rows.length < 2) continue;
  titles.forEach((title, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const isNumeric = title.classList.contains("number");
      const first = isNumeric ? "descending" : "ascending";
      const second = isNumeric ? "ascending" : "descending";
      const order = title.getAttribute("aria-sort") === first ? second : first;
      titles.forEach(other => other.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const key = row => {
        const cell = row.cells[index];
        const data = cell.querySelector("data");
        return data ? Number(data.value) : isNumeric ? null : cell.textContent.trim();
      };
      const compare = (a, b) => {
        if (a === null || b === null) return (a === null) - (b === null);
        if (typeof a === "number" && typeof b === "number") return sign * (a - b);
        return sign * String(a).localeCompare(String(b));
      };
      [...body.rows].map(row => [key(row), row]).sort((a, b) => compare(a[0], b[0]))
        .forEach(pair => body.append(pair[1]));
    });
  });
}
