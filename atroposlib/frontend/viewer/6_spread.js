// How scores and lengths are spread over the groups, and the groups at both ends.

const NUM_BARS = 20;
const NUM_EXTREMES = 3;

function spreadSection() {
  const drawn = [["Mean score", "score"], ["Mean tokens", "tokens"], ["Mean characters", "characters"]]
    .map(([title, field]) => histogram(title, field, [...index.id.keys()].map(FIELDS[field][1]).filter(isNumber)));
  return el("div", { class: "charts" }, drawn.filter(Boolean));
}

/** Groups by a field: a bar leads to its groups. Null where all values are equal. */
function histogram(title, field, values) {
  const [low, high] = rangeOf(values);
  if (!values.some((value) => value !== values[0])) return null;
  const edge = (bar) => Number((low + ((high - low) * bar) / NUM_BARS).toPrecision(6));
  const counts = Array(NUM_BARS).fill(0);
  for (const value of values) {
    const guess = Math.min(NUM_BARS - 1, Math.floor(((value - low) / (high - low)) * NUM_BARS));
    counts[guess - (guess > 0 && value < edge(guess)) + (guess < NUM_BARS - 1 && value >= edge(guess + 1))] += 1; // by the edges as they are written
  }
  const most = Math.max(...counts);
  const bar = (count, at) => {
    const where = [at > 0 && `${field} >= ${edge(at)}`, at < NUM_BARS - 1 && `${field} < ${edge(at + 1)}`].filter(Boolean).join(" and ");
    const title = `${figure(edge(at))} to ${figure(edge(at + 1))}: ${counted(count, "group")}`;
    return el("a", { href: hashWith({ where, view: undefined }), title, "aria-label": title }, el("span", { style: `height:${(100 * count) / most}%` }));
  };
  return el("figure", {}, el("figcaption", {}, title), el("div", { class: "bars" }, counts.map(bar)),
    el("p", { class: "ends" }, el("span", {}, figure(low)), el("span", {}, figure(high))));
}

/** How many groups the audit of rewards suspects, by detector; a number leads to them. */
function suspicions() {
  const found = index.suspicious.flatMap((names) => names.split(" ").filter(Boolean));
  const line = (name) => [name, link(counted(found.filter((each) => each === name).length, "group"), { where: `suspicious ~ "${name}"`, view: undefined })];
  return found.length > 0 && table(["Suspicious", ""], [...new Set(found)].map(line));
}

/** The groups of the lowest and the highest mean scores. */
function extremes() {
  const rows = [...index.id.keys()].filter((row) => isNumber(index.score_mean[row])).sort((a, b) => index.score_mean[a] - index.score_mean[b]);
  if (!rows.length || index.score_mean[rows[0]] === index.score_mean[rows.at(-1)]) return null;
  const line = (row) => [link(index.preview[row] || index.id[row], { group: index.id[row], view: undefined }), index.score_mean[row], index.tokens_mean[row] ?? index.characters_mean[row]];
  const ends = [["Lowest scores", rows.slice(0, NUM_EXTREMES)], ["Highest scores", rows.slice(-NUM_EXTREMES).reverse()]];
  return ends.map(([title, of]) => table([title, "Mean score", "Length"], of.map(line)));
}
