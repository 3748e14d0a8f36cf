// A field above the first long table of the catalogue: every word typed must occur in a row.
addEventListener("DOMContentLoaded", () => {
  const table = [...document.querySelectorAll("article table")].find((each) => each.rows.length > 40);
  if (!table || !document.querySelector("h1")?.textContent.includes("nvironments")) return;
  const rows = [...table.tBodies[0].rows];
  const count = document.createElement("p");
  const field = Object.assign(document.createElement("input"), {
    type: "search", className: "catalogue", placeholder: "Filter: tools, judge, generated, game …", ariaLabel: "Filter environments",
  });
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} environments`;
  };
  field.addEventListener("input", show);
  const first = table.closest(".md-typeset__scrollwrap") ?? table;
  first.before(field, count);
  show();
});
