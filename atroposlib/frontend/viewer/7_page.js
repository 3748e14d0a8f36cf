// The page: its state lives in the address (#group=...&view=tokens), every change of it is drawn by show().

const TYPING_MS = 80; // without a key, after which the filters apply

let state = {};
let shownGroup = null; // {id, group, vocabulary}
const wide = matchMedia("(min-width: 900px)");

const stateOfHash = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** The address of the state with some of its fields changed; undefined and "" leave a field out. */
function hashWith(changes) {
  const fields = Object.entries({ ...state, ...changes }).filter(([, value]) => value !== undefined && value !== "");
  return `#${new URLSearchParams(fields)}`;
}

const link = (name, changes) => el("a", { href: hashWith(changes) }, name);

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
  const draw = () => showDetail({ keepPlace: isGroupSame }).catch(showError);
  if (isListSame) draw();
  else requestAnimationFrame(() => setTimeout(draw)); // the list comes first: the overview of 50,000 groups takes longer
}

const LIST_FIELDS = ["q", "where", "env", "item", "fate", "sort", "kind"];

async function showDetail({ keepPlace = false } = {}) {
  if (!index.chunk) return; // not read yet
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

// The overview: figures, charts, environments, fates.

/** The pages that are about no group, by `view`. */
const PAGES = {
  __proto__: null,
  run: () => (index.evaluation ? evaluationView(index.evaluation) : overview()),
  step: stepPage,
  lengths: lengthsPage,
  items: () => (state.first && state.second ? twoGroupsPage() : itemsPage()),
};

function showRun() {
  if (state.group) return;
  byId("detail").replaceChildren(...(PAGES[state.view] ?? PAGES.run)().filter(Boolean));
  showLive();
}

function overview() {
  const rows = [...index.id.keys()];
  const byName = (names, column) => {
    const members = names.map(() => []);
    for (const row of rows) members[column[row]]?.push(row);
    return names.map((name, number) => [name, members[number]]);
  };
  const lengths = [["Mean tokens", index.tokens_mean], ["Mean characters", index.characters_mean]].filter(([, column]) => column.some(isNumber));
  const environments = byName(index.environments, index.environment).map(([env, of]) =>
    [link(env, { env, view: undefined }), of.length, meanScore(of), ...lengths.map(([, column]) => mean(of.map((row) => column[row])))]);
  const fates = byName(index.fates, index.fate).map(([fate, of]) =>
    [link(fate, { fate, view: undefined }), of.length, percent(of.length / rows.length), meanScore(of)]);
  return [
    el("h2", {}, "Overview"),
    head.live && el("div", { id: "hub" }),
    facts([
      ["groups", figure(rows.length)],
      ["sequences", figure(rows.reduce((sum, row) => sum + index.num_sequences[row], 0))],
      ["mean score", meanScore(rows)],
      ["trained", index.fates.includes("trained") ? figure(rows.filter((row) => fateOf(row) === "trained").length) : null],
    ]),
    el("nav", { class: "row", "aria-label": "Questions" }, itemsLink(), link("Reward against length", { view: "lengths" })),
    settingsSection(),
    chartsSection(),
    environments.length > 1 && table(["Environment", "Groups", "Mean score", ...lengths.map(([title]) => title)], environments),
    fates.length > 0 && table(["Fate", "Groups", "Share", "Mean score"], fates),
    suspicions(),
    spreadSection(),
    ...(extremes() ?? []),
  ];
}

/** Over rollouts, as in the line under the title. */
function meanScore(rows) {
  const scored = rows.filter((row) => isNumber(index.score_mean[row]));
  const sumOf = (value) => scored.reduce((sum, row) => sum + value(row), 0);
  const num = (row) => index.num_rollouts[row];
  return scored.length ? (sumOf((row) => index.score_mean[row] * num(row)) / sumOf(num)).toFixed(3) : "\u2013";
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
  fill(form.fate, ["", ...index.fates, "not trained"].map((fate) => [fate, fate || "all"]));
  const isSortable = (key) => !key || index.id.some((_, row) => isNumber(key(row)));
  fill(form.sort, Object.entries(SORTS).filter(([, [, key]]) => isSortable(key)).map(([name, [title]]) => [name, title]));
  for (const [name, names] of [["env", index.environments], ["fate", index.fates]]) form[name].parentElement.hidden = names.length < 2 && !state[name];
}

/** Show the state in the fields, except in the one that is typed into. */
function fillFilters() {
  const form = byId("filters").elements;
  for (const name of LIST_FIELDS) if (form[name] !== document.activeElement) form[name].value = state[name] ?? "";
  checkExpression(form.where);
  const set = LIST_FIELDS.filter((name) => !["q", "sort", "where"].includes(name) && state[name]);
  byId("more-filters").firstElementChild.textContent = ["Filters", ...set.map((name) => `${name} ${oneLine(state[name], 30)}`)].join(" \u00b7 ");
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
    waiting = setTimeout(() => go(Object.fromEntries(new FormData(form)), { isTyped: true }), TYPING_MS);
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
  if (state.first && !state.group) go({ first: undefined, second: undefined });
  else if (state.view && !(state.group && state.view in PAGES)) go({ view: undefined, pair: undefined });
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
  useIndex(JSON.parse(await inflate(byId("index").textContent)));
  if (head.live) await poll();
  showIndex();
  fillFilters();
  if (!state.group) return;
  await showDetail();
  scrollToRow(rowOfId.get(state.group));
}

start().catch(showError);
