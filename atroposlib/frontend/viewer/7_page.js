// The page: its state lives in the address (#group=...&view=tokens), every change of it is drawn by show().

let state = {};
let shownGroup = null; // {id, group, vocabulary}
const wide = matchMedia("(min-width: 900px)");

const stateOfHash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** The address of the state with some of its fields changed; undefined and "" leave a field out. */
function hashWith(changes) {
  const fields = Object.entries({ ...state, ...changes }).filter(([, value]) => value !== undefined && value !== "");
  return `#${new URLSearchParams(fields)}`;
}

/** Change the state. The browser's Back leads to the state before, except for what is typed. */
function go(changes, { isTyped = false } = {}) {
  const hash = hashWith(changes);
  if (isTyped) location.replace(hash);
  else location.hash = hash;
  show();
}

function show() {
  const next = stateOfHash();
  if (JSON.stringify(next) === JSON.stringify(state) && shownGroup?.id === next.group) return;
  const isListSame = LIST_FIELDS.every((name) => next[name] === state[name]);
  const isGroupSame = shownGroup?.id === next.group;
  state = next;
  if (!isListSame) {
    fillFilters();
    updateList();
  }
  markOpenRow();
  showDetail({ keepPlace: isGroupSame }).catch(showError);
}

const LIST_FIELDS = ["q", "where", "env", "item", "fate", "sort", "score_from", "score_to", "step_from", "step_to"];

async function showDetail({ keepPlace = false } = {}) {
  if (!index.chunk) return; // not read yet
  document.body.dataset.show = state.group ? "group" : ["run", "items"].includes(state.view) ? "run" : "list";
  if (!state.group) {
    shownGroup = null;
    if (state.view === "items") await showItems();
    else showRun();
    return;
  }
  if (shownGroup?.id !== state.group) {
    const id = state.group;
    const found = await readGroup(id);
    if (state.group !== id) return; // another was opened meanwhile
    if (!found) {
      byId("detail").replaceChildren(el("p", { class: "note" }, `This page has no group ${id}.`));
      return;
    }
    shownGroup = { id, ...found };
  }
  const { group, vocabulary } = shownGroup;
  const scrolled = byId("detail").scrollTop;
  const options = [["text", "Text"]];
  if (group.sequences.some((sequence) => sequence.tokens)) options.push(["tokens", "Tokens"]);
  if (group.sequences.length > 1) options.push(["diff", "Difference"]);
  const view = options.some(([name]) => name === state.view) ? state.view : "text";
  const views = { text: textView, tokens: tokenView, diff: differenceView };
  byId("detail").replaceChildren(
    groupHeading(group, rowOfId.get(group.id)),
    tabs(options, view, (name) => go({ view: name === "text" ? undefined : name }), "View"),
    ...views[view](group, vocabulary).flat().filter(Boolean));
  byId("detail").scrollTop = keepPlace ? scrolled : 0;
  for (const pressed of document.querySelectorAll(".tabs [aria-pressed=true]")) pressed.parentElement.scrollLeft = pressed.offsetLeft - 60;
  if (!wide.matches && !keepPlace) {
    scrollTo(0, 0);
    byId("detail").querySelector("h2").focus();
  }
  markMatches();
}

/** Mark what was searched for, where it is in sight or comes in sight by scrolling. */
function markMatches() {
  const ranges = [];
  const walker = document.createTreeWalker(byId("detail"), NodeFilter.SHOW_TEXT);
  while (state.q && ranges.length < 1000 && walker.nextNode()) {
    for (const { index: start, 0: found } of walker.currentNode.data.matchAll(patternOf(state.q, "giu"))) {
      ranges.push(new StaticRange({ startContainer: walker.currentNode, startOffset: start, endContainer: walker.currentNode, endOffset: start + found.length }));
    }
  }
  CSS.highlights?.set("searched", new Highlight(...ranges));
}

function showError(error) {
  byId("detail").replaceChildren(el("p", { class: "note", role: "alert" }, error.message));
}

// The overview: figures, charts, environments, reasons.

function showRun() {
  if (state.group || state.view === "items") return;
  const rows = index.id.map((_, row) => row);
  const ofName = (names, column, filter) => {
    const members = names.map(() => []);
    for (const row of rows) members[column[row]]?.push(row);
    return names.map((name, number) => [name, filter(name), members[number]]);
  };
  const count = (of) => figure(of.length);
  const share = (of) => percent(of.length / rows.length);
  const average = (column) => (of) => figure(mean(of.map((row) => column[row])));
  const lengths = [["Mean tokens", index.tokens_mean], ["Mean characters", index.characters_mean]].filter(([, column]) => column?.some(isNumber));
  const environments = ofName(index.environments, index.environment, (env) => ({ env }));
  const fates = ofName(index.fates, index.fate, (fate) => ({ fate }));
  const score = meanScore(rows);
  byId("detail").replaceChildren(
    el("h2", {}, "Overview"),
    facts([
      ["groups", figure(rows.length)],
      ["sequences", figure(rows.reduce((sum, row) => sum + index.num_sequences[row], 0))],
      ["mean score", score],
      ["trained", index.fates.includes("trained") ? figure(rows.filter((row) => fateOf(row) === "trained").length) : null],
    ]),
    itemsLink(),
    ...(environments.length > 1 ? table([["Environment"], ["Groups", count], ["Mean score", meanScore], ...lengths.map(([title, column]) => [title, average(column)])], environments) : []),
    ...(fates.length ? table([["Fate"], ["Groups", count], ["Share", share], ["Mean score", meanScore]], fates) : []),
    el("div", { class: "charts" }, (head.charts ?? []).map(chart)));
}

/** Over rollouts, as in the line under the title. */
function meanScore(rows) {
  const scored = rows.filter((row) => isNumber(index.score_mean[row]));
  const weight = (of) => of.reduce((sum, row) => sum + index.num_rollouts[row], 0);
  const sum = scored.reduce((total, row) => total + index.score_mean[row] * index.num_rollouts[row], 0);
  return scored.length ? (sum / weight(scored)).toFixed(3) : "\u2013";
}

/** Columns of [title, function of the rows] after the name; lines of [name, filter it leads to, rows]. */
function table(columns, lines) {
  const line = ([name, filter, rows]) =>
    el("tr", {}, el("th", { scope: "row" }, el("a", { href: hashWith({ ...filter, view: undefined }) }, name)),
      columns.slice(1).map(([, value]) => el("td", {}, value(rows))));
  return [el("table", {}, el("thead", {}, el("tr", {}, columns.map(([title]) => el("th", { scope: "col" }, title)))), el("tbody", {}, lines.map(line)))];
}

/** A chart in a shadow root of its own: matplotlib's ids and styles must not meet those of the page. */
function chart({ title, svg }) {
  const parsed = new DOMParser().parseFromString(svg, "image/svg+xml");
  const drawing = parsed.documentElement;
  for (const element of [drawing, ...drawing.querySelectorAll("*")]) {
    if (["script", "foreignObject"].includes(element.localName)) element.remove();
    for (const { name } of [...element.attributes]) if (name.startsWith("on")) element.removeAttribute(name);
  }
  const box = el("div", { role: "img", "aria-label": title });
  const fit = document.createElement("style");
  fit.textContent = "svg { display: block; width: 100%; height: auto; } text { fill: currentColor; }";
  box.attachShadow({ mode: "open" }).append(document.importNode(drawing, true), fit);
  return el("figure", {}, el("figcaption", {}, title), box);
}

// Filters and keys.

function fillOptions() {
  const form = byId("filters").elements;
  const fill = (select, options) => {
    const chosen = select.value;
    if (select.dataset.options === JSON.stringify(options)) return; // it may be open
    select.dataset.options = JSON.stringify(options);
    select.replaceChildren(...options.map(([value, name]) => el("option", { value }, name)));
    select.value = chosen;
  };
  fill(form.env, [["", "all"], ...index.environments.map((name) => [name, name])]);
  fill(form.fate, ["", ...index.fates, ...(index.fates.length > 1 ? ["not trained"] : [])].map((fate) => [fate, fate || "all"]));
  fill(form.sort, Object.entries(SORTS).map(([name, [title]]) => [name, title]));
}

/** Show the state in the fields, except in the one that is typed into. */
function fillFilters() {
  const form = byId("filters").elements;
  for (const name of LIST_FIELDS) if (form[name] !== document.activeElement) form[name].value = state[name] ?? "";
  checkExpression(form.where);
  const num = LIST_FIELDS.filter((name) => !["q", "where"].includes(name) && state[name]).length;
  byId("more-filters").firstElementChild.textContent = num ? `Filters and order (${num} set)` : "Filters and order";
}

/** Open a row in the view that is shown now; its own address is for copying and for new tabs. */
function openClickedRow(event) {
  const row = event.target.closest("a")?.dataset.row;
  if (row === undefined || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go({ group: index.id[row], seq: undefined, pair: undefined });
}

function listenToFilters() {
  const form = byId("filters");
  let waiting = 0;
  const waitForMore = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => go(Object.fromEntries(new FormData(form)), { isTyped: true }), 200);
  };
  form.elements.where.addEventListener("input", ({ target }) => checkExpression(target));
  form.addEventListener("input", waitForMore);
  form.addEventListener("change", waitForMore);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    go(Object.fromEntries(LIST_FIELDS.map((name) => [name, undefined])));
  });
  byId("scan-cancel").addEventListener("click", stopScan);
}

const KEYS = {
  j: () => openNeighbour(1),
  k: () => openNeighbour(-1),
  ArrowDown: () => openNeighbour(1),
  ArrowUp: () => openNeighbour(-1),
  "/": () => byId("filters").elements.q.focus(),
  t: () => state.group && go({ view: state.view === "tokens" ? undefined : "tokens" }),
  c: nextColour,
  Escape: goBack,
  "?": () => byId("keys").showModal(),
};

function nextColour() {
  if (!shownGroup || state.view !== "tokens") return;
  const names = Object.keys(coloursOf(shownGroup.group.sequences[Number(state.seq ?? 0)]));
  go({ colour: names[(names.indexOf(state.colour ?? names[0]) + 1) % names.length] });
}

function goBack() {
  if (state.first) go({ first: undefined, second: undefined });
  else if (state.view) go({ view: undefined, pair: undefined });
  else if (state.group) go({ group: undefined });
}

function listenToKeys() {
  addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
    if (isTyping && event.key === "Escape") event.target.blur();
    if (isTyping || byId("keys").open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow") && byId("detail").contains(event.target)) return; // arrows scroll there
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function showHead(shown) {
  byId("title").textContent = shown.title ?? "";
  byId("about").textContent = shown.about ?? "";
  head.charts = shown.charts;
}

function showIndex() {
  fillOptions();
  updateList();
  if (!state.group) showDetail({ keepPlace: true }).catch(showError);
}

async function start() {
  showHead(head);
  state = stateOfHash();
  listenToFilters();
  listenToKeys();
  addEventListener("hashchange", show);
  new ResizeObserver(() => showRows({ anew: false })).observe(byId("scroller"));
  byId("rows").addEventListener("click", openClickedRow);
  byId("scroller").addEventListener("scroll", () => showRows({ anew: false }), { passive: true });
  byId("open-keys").addEventListener("click", () => byId("keys").showModal());
  byId("open-run").addEventListener("click", () => go({ group: undefined, view: "run" }));
  byId("open-items").addEventListener("click", () => go({ group: undefined, view: "items" }));
  byId("more-filters").open = wide.matches;
  useIndex(JSON.parse(await inflate(byId("index").textContent)));
  if (head.live) await poll();
  showIndex();
  fillFilters();
  if (!state.group) return;
  await showDetail();
  scrollToRow(rowOfId.get(state.group));
}

start().catch(showError);
