// The list: filters and order over the index columns, the search through the chunks, and a window of rows.

const ROW_PX = 62; // as in viewer.css
const SORTS = {
  "": [head.live ? "newest first" : "as in the file", null],
  advantage: ["largest advantage", (row) => index.advantage_max[row]],
  high: ["highest mean score", (row) => index.score_mean[row]],
  low: ["lowest mean score", (row) => negated(index.score_mean[row])],
  spread: ["widest scores", (row) => index.score_max[row] - index.score_min[row]],
  gap: ["largest gap", (row) => index.gap_mean[row]],
  stale: ["stalest", (row) => index.staleness[row]],
  long: ["longest", (row) => lengthOf(row)],
  loss: ["largest share of its step", (row) => index.loss_share[row]],
  last: ["last step first", (row) => index.step[row]],
};
const negated = (value) => (isNumber(value) ? -value : null);

let listed = []; // the rows that pass the filters, in order
let scan = null; // {key, found, done, chunks, isRunning}: the search through the texts

/** The rows that pass the fields of the form and the expression; an expression with a fault lets all pass. */
function passesColumns() {
  const { env, fate, item = "", kind, where = "" } = state;
  const isNamed = matcher(item);
  const tests = [
    env && comparison("env", "==", env),
    fate && (fate === "not trained" ? comparison("fate", "!=", "trained") : comparison("fate", "==", fate)),
    /^\d+$/.test(item) ? comparison("item", "==", Number(item)) : item && ((row) => isNamed(index.item[row]) || isNamed(index.id[row])),
    kind && rowsOfKind(kind),
    parsedExpression(where).test,
  ].filter(Boolean);
  return [...index.id.keys()].filter((row) => tests.every((passes) => passes(row)));
}

const fateOf = (row) => index.fates[index.fate[row]];
const lengthOf = (row) => index.tokens_mean[row] ?? index.characters_mean[row];

function inOrder(rows) {
  const key = SORTS[state.sort]?.[1];
  if (!key) return head.live ? rows.toReversed() : rows;
  const ranks = new Float64Array(index.id.length).fill(-Infinity);
  for (const row of rows) if (isNumber(key(row))) ranks[row] = key(row);
  return rows.toSorted((a, b) => ranks[b] - ranks[a] || a - b); // -Infinity less itself is no number
}

/** Apply the filters; a search is started where the query or the filters changed. */
function updateList() {
  const rows = passesColumns();
  if (state.q) {
    const key = JSON.stringify([LIST_FIELDS.map((name) => name !== "sort" && state[name]), index.id.length, index.id[0]]);
    if (scan?.key !== key) beginScan(key, rows);
    listed = inOrder(rows.filter((row) => scan.found.has(row)));
  } else {
    scan = null;
    listed = inOrder(rows);
  }
  showCount();
  showRows();
}

function beginScan(key, rows) {
  const isWanted = matcher(state.q);
  const found = new Set(rows.filter((row) => isWanted(index.preview[row]) || isWanted(index.item[row])));
  scan = { key, found, done: 0, chunks: [...new Set(rows.map((row) => index.chunk[row]))], isRunning: true };
  searchTexts(scan, isWanted).catch((error) => {
    stopScan();
    byId("count").textContent = error.message;
  });
}

async function searchTexts(mine, isWanted) {
  let shown = performance.now();
  // A query of plain letters is spelled the same in JSON: most chunks need no parsing.
  const isPlain = /^[\w .,;:!?()+*=-]*$/.test(state.q);
  for (const number of mine.chunks) {
    if (scan !== mine || !mine.isRunning) return;
    const json = live ? null : await chunkText(number);
    if (live || !isPlain || isWanted(json)) {
      const { groups } = live ?? JSON.parse(json);
      for (const group of groups) {
        if (searchedTexts(group).some(isWanted)) mine.found.add(rowOfId.get(group.id));
      }
    }
    mine.done += 1;
    if (performance.now() - shown > 200) {
      if (scan === mine) updateList();
      shown = performance.now();
    }
  }
  mine.isRunning = false;
  if (scan === mine) updateList();
}

function stopScan() {
  if (scan) scan.isRunning = false;
  showCount();
}

function showCount() {
  const all = index.id.length;
  const parts = [listed.length === all ? counted(all, "group") : `${figure(listed.length)} of ${counted(all, "group")}`];
  if (scan && !scan.isRunning && scan.done < scan.chunks.length) {
    parts.push(`search stopped at ${Math.round((100 * scan.done) / scan.chunks.length)} %`);
  }
  byId("count").textContent = parts.join(", ");
  byId("scan").hidden = !scan?.isRunning;
  byId("scan-progress").max = scan?.chunks.length ?? 1;
  byId("scan-progress").value = scan?.done ?? 0;
}

// Only the rows in sight are in the document.

const rowElements = new Map(); // row -> <li>

function showRows({ anew = true } = {}) {
  const scroller = byId("scroller");
  const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_PX) - 8);
  const last = Math.min(listed.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / ROW_PX) + 8);
  const inSight = new Set(listed.slice(first, last));
  byId("rows").style.height = `${listed.length * ROW_PX}px`;
  for (const [row, element] of rowElements) {
    if (anew || !inSight.has(row)) {
      element.remove();
      rowElements.delete(row);
    }
  }
  for (let place = first; place < last; place++) {
    const row = listed[place];
    if (!rowElements.has(row)) {
      rowElements.set(row, rowElement(row));
      byId("rows").append(rowElements.get(row));
    }
    const element = rowElements.get(row);
    element.style.top = `${place * ROW_PX}px`;
    element.setAttribute("aria-posinset", place + 1);
    element.setAttribute("aria-setsize", listed.length);
  }
  markOpenRow();
}

function rowElement(row) {
  const environment = index.environments.length > 1 ? index.environments[index.environment[row]] : null;
  const details = [
    environment,
    isNumber(index.item_id[row]) && `item ${index.item_id[row]}`,
    isNumber(index.step[row]) && `step ${index.step[row]}`,
    index.num_rollouts[row] < index.num_sequences[row] && counted(index.num_rollouts[row], "rollout"),
    counted(index.num_sequences[row], "sequence"),
    isNumber(index.staleness[row]) && index.staleness[row] > 0 && `stale ${index.staleness[row]}`,
  ].filter(Boolean);
  const fate = fateOf(row);
  return el("li", {}, el("a", { href: hashWith({ group: index.id[row], seq: undefined, pair: undefined }), "data-row": row },
    el("span", {}, el("bdi", { class: "preview" }, index.preview[row] || index.id[row]), figure(index.score_mean[row]), spreadBar(row)),
    el("span", { class: "details" }, el("bdi", {}, details.join(" \u00b7 ")), fate !== "trained" && el("span", { class: "dropped" }, fate)),
  ));
}

/** The lowest, mean and highest score of the group on the scale of the whole run. */
function spreadBar(row) {
  const [low, high] = scoreScale();
  if (!isNumber(index.score_min[row]) || high === low) return null;
  const place = (score) => (100 * (score - low)) / (high - low);
  const [from, to] = [place(index.score_min[row]), place(index.score_max[row])];
  const title = `mean score ${figure(index.score_mean[row])}, from ${figure(index.score_min[row])} to ${figure(index.score_max[row])}`;
  return el("span", { class: "spread", title },
    el("span", { style: `left:${from}%;width:${to - from}%` }),
    el("span", { class: "mean", style: `left:${place(index.score_mean[row])}%` }));
}

let scale = { of: null, value: [0, 0] };
function scoreScale() {
  if (scale.of !== index) {
    scale = { of: index, value: [negated(largest(index.score_min.map(negated))), largest(index.score_max)] };
  }
  return scale.value;
}

function markOpenRow() {
  for (const [row, element] of rowElements) {
    if (index.id[row] === state.group) element.firstChild.setAttribute("aria-current", "true");
    else element.firstChild.removeAttribute("aria-current");
  }
}

/** Open the group `distance` rows away from the open one; the first if none is open. */
function openNeighbour(distance) {
  const place = listed.indexOf(rowOfId.get(state.group));
  const next = listed[place < 0 ? 0 : place + distance];
  if (next === undefined) return;
  go({ group: index.id[next], seq: undefined, pair: undefined });
  scrollToRow(next);
}

function scrollToRow(row) {
  const scroller = byId("scroller");
  const top = listed.indexOf(row) * ROW_PX;
  if (top < scroller.scrollTop) scroller.scrollTop = top;
  if (top + ROW_PX > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + ROW_PX - scroller.clientHeight;
}
