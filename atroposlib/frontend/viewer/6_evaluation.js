// The first page of an evaluation, or of two that are compared: the result, every metric, and a table of the answers.

const ANSWERS_AT_ONCE = 200;

const isShare = (name) => /correct|acc|pass@/.test(name);

/** A value of a metric: shares of right answers in percent, their differences in points. */
function metricFigure(name, value, { isDifference = false } = {}) {
  if (!isNumber(value)) return "\u2013";
  const show = isDifference ? signed : figure;
  return isShare(name) ? `${show(Number((100 * value).toFixed(1)))} ${isDifference ? "points" : "%"}` : show(Number(value.toFixed(4)));
}

function evaluationView({ metrics, rows }) {
  const isComparison = metrics.some((metric) => metric.before !== null);
  const result = (name, value) => metricFigure(name, value, { isDifference: isComparison });
  const interval = ({ name, low, high }) => (isNumber(low) && isNumber(high) ? `${result(name, low)} to ${result(name, high)}` : "");
  const [first] = metrics;
  const title = (name) => name.replace(/^eval\//, "").replaceAll("_", " ");
  const about = first && [
    isComparison && `from ${metricFigure(first.name, first.before)} to ${metricFigure(first.name, first.after)}`,
    interval(first) && `95 % interval ${interval(first)}`,
    isNumber(first.n) && counted(first.n, isComparison ? "paired item" : "answer"),
  ].filter(Boolean).join(" \u00b7 ");
  const titles = ["Metric", ...(isComparison ? ["Before", "After", "Difference"] : ["Value"]), "95 % interval", isComparison ? "Items" : "n"];
  const cells = (metric) => [
    ...(isComparison ? [metric.before, metric.after] : []).map((value) => metricFigure(metric.name, value)),
    result(metric.name, metric.value), interval(metric), isNumber(metric.n) ? figure(metric.n) : "",
  ];
  return [
    el("h2", {}, isComparison ? "Comparison" : "Evaluation"),
    first && el("p", { class: "result" }, el("strong", {}, result(first.name, first.value)), el("span", {}, `${title(first.name)}${about ? `: ${about}` : ""}`)),
    metrics.length > 1 && fold(counted(metrics.length, "metric"), () => table(titles, metrics.map((metric) => [title(metric.name), ...cells(metric)])), { open: metrics.length < 12 }),
    ...answersTable(rows, isComparison),
  ].filter(Boolean);
}

/** Buttons for each kind of answer, and the answers of the one that is chosen. */
function answersTable(rows, isComparison) {
  const kinds = new Map();
  for (const kind of rows.kind) kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  const options = [["", `all ${figure(rows.kind.length)}`], ...[...kinds].sort().reverse().map(([kind, count]) => [kind, `${kind === "wrong" ? "wrong only" : kind} ${figure(count)}`])];
  const places = [...rows.kind.keys()].filter((place) => !state.kind || rows.kind[place] === state.kind);
  const optional = [["target", "Target"], ["read", isComparison ? "Read before \u2192 after" : "What was read"], ["tokens", "Tokens"], ["why", "Explanation"]]
    .filter(([name]) => rows[name].some((value) => value !== null));
  const titles = ["Item", isComparison ? "Change" : "Result", "Input", ...optional.map(([, title]) => title)];
  const made = table(titles, [], "answers");
  const make = (i) => answerRow(rows, places[i], optional);
  return [
    tabs(options, state.kind ?? "", (kind) => go({ kind: kind || undefined }), "Answers"),
    made,
    showMore(made.querySelector("tbody"), places.length, { atOnce: ANSWERS_AT_ONCE, noun: "answer", make }),
  ];
}

function answerRow(rows, place, optional) {
  const row = rows.row[place];
  const kind = rows.kind[place];
  const name = index.item[row].match(/^\d+(?= |$)/)?.[0] ?? index.id[row];
  const cell = ([column]) => el("td", { class: `of-${column}` }, isNumber(rows[column][place]) ? figure(rows[column][place]) : el("bdi", {}, rows[column][place] ?? "\u2013"));
  return el("tr", {},
    el("th", { scope: "row" }, link(rows.seq[place] ? `${name} #${rows.seq[place] + 1}` : name, { group: index.id[row], view: undefined, seq: rows.seq[place] || undefined })),
    el("td", {}, el("span", { class: `kind ${/(^| )wrong$|worse/.test(kind) ? "wrong" : /right$|better/.test(kind) ? "right" : ""}` }, kind)),
    el("td", { class: "of-input" }, el("bdi", {}, index.preview[row])),
    optional.map(cell));
}

/** Return a test whether a row of the list has an answer of a kind. */
function rowsOfKind(kind) {
  const rows = new Set(index.evaluation?.rows.row.filter((_, place) => index.evaluation.rows.kind[place] === kind));
  return (row) => rows.has(row);
}
