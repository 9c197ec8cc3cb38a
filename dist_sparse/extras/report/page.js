for (const head of document.querySelectorAll("th[data-key]")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "descending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const place = head.cellIndex;
    const key = (row) => row.cells[place].dataset.value;
    const order = (a, b) => (isNaN(a) || isNaN(b) || a === "" || b === "" ? a.localeCompare(b) : a - b);
    body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b))));
  });
}
for (const place of document.querySelectorAll("[data-filter]")) {
  const rows = [...place.parentNode.querySelectorAll("tbody tr")];
  const box = document.createElement("input");
  box.type = "search";
  box.className = "filter";
  box.placeholder = box.ariaLabel = place.dataset.filter;
  box.addEventListener("input", () => {
    const wanted = box.value.toLowerCase();
    for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  });
  place.append(box);
}
