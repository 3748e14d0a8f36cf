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

const LIST_FIELDS = ["q", "env", "item", "fate", "sort", "score_from", "score_to", "step_from", "step_to", "kind"];

async function showDetail({ keepPlace = false } = {}) {
  document.body.dataset.show = state.group ? "group" : state.view in PAGES ? "run" : "list";
  if (!state.group) {
    shownGroup = null;
    showRun();
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
    useTrees(found.group);
  }
  const { group, vocabulary } = shownGroup;
  const scrolled = byId("detail").scrollTop;
  const options = [["text", "Text"]];
  if (group.sequences.some((sequence) => sequence.tokens)) options.push(["tokens", "Tokens"]);
  if (group.sequences.length > 1) options.push(["diff", "Difference"]);
  if (hasRewards(group)) options.push(["rewards", "Rewards"]);
  const view = options.some(([name]) => name === state.view) ? state.view : "text";
  const views = { text: textView, tokens: tokenView, diff: differenceView, rewards: rewardsView };
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

/** The pages that are about no group, by `view`. */
const PAGES = { run: () => (index.evaluation ? evaluationView(index.evaluation) : overview()), step: stepPage, lengths: lengthsPage };

function showRun() {
  if (state.group) return;
  byId("detail").replaceChildren(...(PAGES[state.view] ?? PAGES.run)().filter(Boolean));
  showLive();
}

function overview() {
  const kept = index.dropped.filter((reason) => reason < 0).length;
  const num = (column, wanted) => column.reduce((count, value) => count + (value === wanted ? 1 : 0), 0);
  const environments = index.environments.map((name, number) => {
    const rows = index.environment.flatMap((one, row) => (one === number ? [row] : []));
    return [name, { env: name }, rows.length, mean(rows.map((row) => index.score_mean[row])), mean(rows.map((row) => index.length_mean[row]))];
  });
  const reasons = index.reasons.map((reason, number) => [reason, { fate: `dropped: ${reason}` }, num(index.dropped, number)]);
  return [
    el("h2", {}, "Overview"),
    ...(head.live ? [el("div", { id: "hub" })] : []),
    facts([
      ["groups", figure(index.id.length)],
      ["sequences", figure(index.num_sequences.reduce((sum, count) => sum + count, 0))],
      ["mean score", figure(mean(index.score_mean))],
      ["kept", reasons.length ? figure(kept) : null],
    ]),
    el("nav", { class: "row", "aria-label": "Questions" }, el("a", { href: hashWith({ view: "lengths" }) }, "Reward against length")),
    settingsSection(),
    chartsSection(),
    ...(environments.length > 1 ? table(["Environment", "Groups", "Mean score", "Mean length"], environments) : []),
    ...(reasons.length ? table(["Dropped", "Groups"], reasons) : []),
  ];
}

/** Rows of [name, filter it leads to or null, figures or elements...]. */
function table(titles, rows) {
  const row = ([name, filter, ...figures]) =>
    el("tr", {}, el("th", { scope: "row" }, filter ? el("a", { href: hashWith({ ...filter, view: undefined }) }, name) : name), figures.map((value) => el("td", {}, value instanceof Node ? value : figure(value))));
  return [el("table", {}, el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, rows.map(row)))];
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
  fill(form.fate, [["", "all"], ["kept", "kept"], ["dropped", "dropped"], ...index.reasons.map((reason) => [`dropped: ${reason}`, `dropped: ${reason}`])]);
  const isSortable = (key) => !key || index.id.some((_, row) => isNumber(key(row)));
  fill(form.sort, Object.entries(SORTS).filter(([, [, key]]) => isSortable(key)).map(([name, [title]]) => [name, title]));
  const [lowest, highest] = scoreScale();
  const isUseful = {
    env: index.environments.length > 1,
    fate: index.reasons.length > 0,
    score: lowest !== highest,
    step: index.step.some(isNumber),
  };
  for (const field of document.querySelectorAll("[data-field]")) {
    field.hidden = !isUseful[field.dataset.field] && ![...field.querySelectorAll("[name]")].some(({ name }) => state[name]);
  }
}

/** Show the state in the fields, except in the one that is typed into. */
function fillFilters() {
  const form = byId("filters").elements;
  for (const name of LIST_FIELDS) if (form[name] !== document.activeElement) form[name].value = state[name] ?? "";
  const set = LIST_FIELDS.filter((name) => !["q", "sort"].includes(name) && state[name]);
  byId("more-filters").firstElementChild.textContent = ["Filters", ...set.map((name) => `${name.replace("_", " ")} ${oneLine(state[name], 30)}`)].join(" \u00b7 ");
  byId("clear").hidden = !set.length;
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
  n: () => openChange(1),
  p: () => openChange(-1),
  r: () => state.group && go({ raw: state.raw ? undefined : "1" }),
  Escape: goBack,
  "?": () => byId("keys").showModal(),
};

function nextColour() {
  if (!shownGroup || state.view !== "tokens") return;
  const names = Object.keys(coloursOf(shownGroup.group.sequences[Number(state.seq ?? 0)]));
  go({ colour: names[(names.indexOf(state.colour ?? names[0]) + 1) % names.length] });
}

function goBack() {
  if (state.view && !(state.group && state.view in PAGES)) go({ view: undefined, pair: undefined });
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
  head.hub = shown.hub;
  head.points = shown.points;
  showLive();
}

function showIndex() {
  fillOptions();
  updateList();
  showRun();
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
  const packed = byId("index").textContent.trim();
  if (packed) useIndex(JSON.parse(await inflate(packed)));
  if (head.live) await poll();
  showIndex();
  fillFilters();
  await showDetail();
  if (state.group) scrollToRow(rowOfId.get(state.group));
}

start().catch(showError);
