// Reward against length: a diagram per environment whose points open groups, and whether longer answers earn more.

const REACH_PX = 14; // how near the pointer must be to a point
const SHADES = 4;

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

/** Points that lie on each other are drawn once, the more of them the darker. */
function scatter(rows) {
  const points = rows.filter((row) => isNumber(index.score_mean[row]) && isNumber(lengthOf(row)));
  const size = wide.matches ? { ...CHART, width: 560, height: 260 } : CHART;
  const [xs, ys] = [rangeOf(points.map(lengthOf)), rangeOf(points.map((row) => index.score_mean[row]))];
  const marks = (range) => ticks(...range, 5).map((value) => [value, String(value)]);
  const { drawing, xOf, yOf, placeOf } = axes({ title: "mean score against mean length", xs, ys, xMarks: marks(xs), yMarks: marks(ys), size });
  const places = points.map((row) => [xOf(lengthOf(row)), yOf(index.score_mean[row])]);
  const counts = new Map();
  for (const place of places) {
    const spot = place.map(Math.round).join(" ");
    counts.set(spot, (counts.get(spot) ?? 0) + 1);
  }
  const spots = [...counts.keys()];
  const most = Math.log1p(largest([...counts.values()]));
  for (let shade = 1; shade <= SHADES; shade++) {
    const shaded = spots.filter((spot) => Math.ceil((SHADES * Math.log1p(counts.get(spot))) / most) === shade);
    drawing.append(svg("path", { class: "points", opacity: 0.4 + (0.6 * shade) / SHADES, d: shaded.map((spot) => `M${spot}h0`).join("") }));
  }
  const label = el("p", { class: "about", role: "status" }, "mean length \u2192, mean score \u2191");
  function pointed(event) {
    const [x, y] = placeOf(event);
    let [best, distance] = [null, REACH_PX ** 2];
    places.forEach(([px, py], i) => {
      const squared = (px - x) ** 2 + (py - y) ** 2;
      if (squared < distance) [best, distance] = [points[i], squared];
    });
    return best;
  }
  drawing.addEventListener("pointermove", (event) => {
    const row = pointed(event);
    drawing.style.cursor = row === null ? "default" : "pointer";
    if (row !== null) label.textContent = `mean length ${figure(lengthOf(row))}, mean score ${figure(index.score_mean[row])}: ${index.preview[row] || index.id[row]}`;
  });
  drawing.addEventListener("click", (event) => {
    const row = pointed(event);
    if (row !== null) go({ group: index.id[row], seq: undefined, pair: undefined });
  });
  return el("figure", {}, drawing, label);
}
