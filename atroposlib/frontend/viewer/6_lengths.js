// Reward against length: a diagram per environment whose points open groups, and whether longer answers earn more.

const REACH_PX = 14; // how near the pointer must be to a point

/** The groups that pass the filters, by environment. */
function lengthsPage() {
  const names = index.environments.length ? index.environments.map((name, number) => [name, number]) : [["", -1]];
  const sections = names.map(([name, number]) => [name, listed.filter((row) => index.environment[row] === number)]).filter(([, rows]) => rows.length);
  return [
    el("h2", {}, "Reward against length"),
    el("p", { class: "about" }, "A point is a group that passes the filters: its mean length and mean score. Click one to open it."),
    el("div", { class: "charts wide" }, sections.map(([name, rows]) =>
      el("section", {}, name && el("h3", {}, name), el("p", {}, lengthVerdict(rows)), scatter(rows)))),
  ];
}

/** Whether length is paid, by the correlation of score and length inside of each group: the item is the same there. */
function lengthVerdict(rows) {
  const found = rows.map((row) => index.length_correlation[row]).filter(isNumber);
  if (found.length < 2) return "Too few groups have different scores and different lengths to say whether length is paid.";
  const middle = mean(found);
  const error = 1.96 * Math.sqrt(found.reduce((sum, one) => sum + (one - middle) ** 2, 0) / (found.length - 1) / found.length);
  const slightly = Math.abs(middle) < 0.1 ? "slightly " : "";
  const answer = middle - error > 0 ? `Longer answers earn ${slightly}more` : middle + error < 0 ? `Shorter answers earn ${slightly}more` : "Length is not visibly paid";
  return `${answer}: within a group, score and length correlate by ${signed(middle)} on average (95 % interval ${signed(middle - error)} to ${signed(middle + error)}, ${counted(found.length, "group")} where both differ).`;
}

function scatter(rows) {
  const points = rows.filter((row) => isNumber(index.score_mean[row]) && isNumber(lengthOf(row)));
  const { width, height, left, right, top, bottom } = wide.matches ? { ...CHART, width: 560, height: 260 } : CHART;
  const xs = rangeOf(points.map((row) => lengthOf(row)));
  const ys = rangeOf(points.map((row) => index.score_mean[row]));
  const xOf = (value) => left + ((width - left - right) * (value - xs[0])) / (xs[1] - xs[0]);
  const yOf = (value) => height - bottom - ((height - top - bottom) * (value - ys[0])) / (ys[1] - ys[0]);
  const places = points.map((row) => [xOf(lengthOf(row)), yOf(index.score_mean[row])]);
  const label = el("p", { class: "about", role: "status" }, "mean length \u2192, mean score \u2191");
  const canvas = el("canvas", { width: 2 * width, height: 2 * height, role: "img", "aria-label": "mean score against mean length" });
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  // A canvas knows no light-dark(): an element resolves the colours.
  const colourOf = (selector) => getComputedStyle(document.querySelector(selector)).color;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = pen.strokeStyle = colourOf("#about");
  pen.lineWidth = 0.25;
  pen.textAlign = "right";
  for (const value of ticks(...ys, 5)) {
    pen.fillText(String(value), left - 5, yOf(value) + 4);
    pen.strokeRect(left, yOf(value), width - left - right, 0);
  }
  pen.textAlign = "center";
  for (const value of ticks(...xs, 5)) pen.fillText(String(value), xOf(value), height - 6);
  pen.fillStyle = colourOf("#live");
  pen.globalAlpha = Math.max(0.08, Math.min(0.7, 60 / Math.sqrt(points.length)));
  for (const [x, y] of places) pen.fillRect(x - 1.75, y - 1.75, 3.5, 3.5);
  function pointed(event) {
    const box = canvas.getBoundingClientRect();
    const scale = width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let [best, distance] = [null, (REACH_PX * scale) ** 2];
    places.forEach(([px, py], i) => {
      const squared = (px - x) ** 2 + (py - y) ** 2;
      if (squared < distance) [best, distance] = [points[i], squared];
    });
    return best;
  }
  canvas.addEventListener("pointermove", (event) => {
    const row = pointed(event);
    canvas.style.cursor = row === null ? "default" : "pointer";
    if (row !== null) label.textContent = `mean length ${figure(lengthOf(row))}, mean score ${figure(index.score_mean[row])}: ${index.preview[row] || index.id[row]}`;
  });
  canvas.addEventListener("click", (event) => {
    const row = pointed(event);
    if (row !== null) go({ group: index.id[row], seq: undefined, pair: undefined });
  });
  return el("figure", {}, canvas, label);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.view === "lengths" && showRun());
