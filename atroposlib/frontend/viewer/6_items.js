// The items: every group of an item in order of policy versions (without them of steps), which are solved, which were forgotten.

const ITEMS_PER_PAGE = 50;
const MAX_CELLS = 32;
const ITEM_KINDS = {
  all: ["All", () => true],
  never: ["Never solved", (item) => item.numSolved === 0],
  always: ["Always solved", (item) => item.numSolved === item.rows.length && item.isAlways],
  forgotten: ["Forgotten", (item) => item.numSolved > 0 && !item.isSolvedLast],
};
const ITEM_SORTS = {
  "": ["least solved first", (a, b) => a.numSolved / a.rows.length - b.numSolved / b.rows.length || a.mean - b.mean],
  most: ["most solved first", (a, b) => b.numSolved / b.rows.length - a.numSolved / a.rows.length || b.mean - a.mean],
  groups: ["most groups first", (a, b) => b.rows.length - a.rows.length],
  name: ["by name", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true })],
};

/** When a group was sampled; in order of the file without versions and steps. */
const timeOf = (row) => index.policy_version[row] ?? index.step[row];

/** The score from which a rollout counts as solved: the middle of the run's scale unless given. */
function solvedFrom() {
  const given = Number(state.solved);
  const [low, high] = scoreScale();
  return state.solved && Number.isFinite(given) ? given : (low + high) / 2;
}

let itemsOf = { of: null, limit: null, items: [], timeName: "" };

/** Every item with its groups: {name, environment, rows, numSolved, isSolvedLast, isAlways, mean}. */
function allItems() {
  const limit = solvedFrom();
  if (itemsOf.of === index && itemsOf.limit === limit) return itemsOf.items;
  const found = new Map();
  for (let row = 0; row < index.id.length; row++) {
    const name = index.item_id[row] ?? index.item[row];
    if (name === "" || !isNumber(index.score_mean[row])) continue;
    const key = `${index.environment[row]} ${name}`;
    if (!found.has(key)) found.set(key, { name: index.item[row] || String(name), environment: index.environments[index.environment[row]], rows: [] });
    found.get(key).rows.push(row);
  }
  const items = [...found.values()];
  for (const item of items) {
    item.rows.sort((a, b) => (timeOf(a) ?? 0) - (timeOf(b) ?? 0) || a - b);
    item.numSolved = item.rows.filter((row) => index.score_max[row] >= limit).length;
    item.isSolvedLast = index.score_max[item.rows.at(-1)] >= limit;
    item.isAlways = item.rows.every((row) => index.score_min[row] >= limit);
    item.mean = mean(item.rows.map((row) => index.score_mean[row]));
  }
  itemsOf = { of: index, limit, items, timeName: index.policy_version.some(isNumber) ? "policy" : "step" };
  return items;
}

const itemsLink = () => {
  const num = allItems().length;
  return num > 0 && link(`${counted(num, "item")}: never solved, always solved, forgotten`, { view: "items" });
};

function itemsPage() {
  const items = allItems();
  const kind = Object.hasOwn(ITEM_KINDS, state.items ?? "") ? state.items : "all";
  const chosen = items.filter(ITEM_KINDS[kind][1]).sort((ITEM_SORTS[state.order] ?? ITEM_SORTS[""])[1]);
  const lastPage = Math.max(0, Math.ceil(chosen.length / ITEMS_PER_PAGE) - 1);
  const page = Math.min(Number(state.page) || 0, lastPage);
  const kinds = Object.entries(ITEM_KINDS).map(([name, [title, isOne]]) => [name, `${title} (${figure(items.filter(isOne).length)})`]);
  const turn = (name, to) => el("button", { type: "button", disabled: to < 0 || to > lastPage, onclick: () => go({ page: to || undefined }) }, name);
  const solved = el("input", { value: figure(solvedFrom()), inputmode: "decimal", "aria-label": "Solved from a score of", onchange: ({ target }) => go({ solved: target.value, page: undefined }) });
  return [
    el("h2", {}, "Items"),
    el("p", { class: "about" }, "A group solves its item if one of its rollouts does, from a score of ", solved,
      `. A strip has the mean score of the item's groups in order of ${itemsOf.timeName === "policy" ? "policy versions" : "steps"}: the first on the left. A click shows the first and the last side by side.`),
    tabs(kinds, kind, (name) => go({ items: name === "all" ? undefined : name, page: undefined }), "Which items"),
    el("div", { class: "row" },
      choice(Object.entries(ITEM_SORTS).map(([name, [title]]) => [name, title]), state.order ?? "", (order) => go({ order, page: undefined }), "Order of the items"),
      turn("Previous page", page - 1), el("span", {}, `${chosen.length ? page + 1 : 0} of ${chosen.length ? lastPage + 1 : 0}`), turn("Next page", page + 1)),
    table(["Item", "Groups", "Solved", "Mean score", "Over time"], chosen.slice(page * ITEMS_PER_PAGE, (page + 1) * ITEMS_PER_PAGE).map(itemRow), "items"),
  ];
}

function itemRow(item) {
  const name = index.environments.length > 1 ? `${item.environment}: ${item.name}` : item.name;
  return [link(name, twoGroups(item.rows[0], item.rows.at(-1))), item.rows.length, percent(item.numSolved / item.rows.length), item.mean.toFixed(3), strip(item)];
}

const twoGroups = (first, second) => ({ view: "items", first: index.id[first], second: index.id[second] });

/** Mean scores over time, neighbours joined beyond 32 groups. Each cell compares its last group with the item's last one. */
function strip(item) {
  const [low, high] = scoreScale();
  const num = Math.min(MAX_CELLS, item.rows.length);
  const cells = Array.from({ length: num }, (_, i) => item.rows.slice(Math.floor((i * item.rows.length) / num), Math.floor(((i + 1) * item.rows.length) / num)));
  return el("span", { class: "strip" }, cells.map((rows) => {
    const score = mean(rows.map((row) => index.score_mean[row]));
    const share = high > low ? (score - low) / (high - low) : 0;
    const when = [...new Set([timeOf(rows[0]), timeOf(rows.at(-1))])].filter(isNumber).join(" to ");
    const title = `${when ? `${itemsOf.timeName} ${when}: ` : ""}mean score ${figure(score)} of ${counted(rows.length, "group")}`;
    return el("a", { href: hashWith(twoGroups(rows.at(-1), item.rows.at(-1))), title, "aria-label": title, style: `--share:${(100 * share).toFixed(0)}%` });
  }));
}

/** Two groups of an item; each comes when it is read. */
function twoGroupsPage() {
  const rows = [state.first, state.second].map((id) => rowOfId.get(id));
  if (rows.includes(undefined)) return [el("p", { class: "note" }, "This page does not have both groups.")];
  const item = allItems().find((one) => one.rows.includes(rows[0]));
  const when = (row) => `${isNumber(timeOf(row)) ? `${itemsOf.timeName} ${timeOf(row)}` : `group ${index.id[row]}`}, mean score ${figure(index.score_mean[row])}`;
  const column = (name, title, place) => {
    const id = state[name];
    const box = el("section", {},
      choice((item?.rows ?? [rows[place]]).map((row) => [index.id[row], when(row)]), id, (chosen) => go({ [name]: chosen }), title),
      el("p", { class: "about" }, link("Open this group alone", { group: id, view: undefined, first: undefined, second: undefined })));
    readGroup(id).then(({ group, vocabulary }) => {
      addTrees(group);
      box.append(...textView(group, vocabulary).flat().filter(Boolean));
    }).catch(showError);
    return box;
  };
  byId("detail").scrollTop = 0;
  return [
    el("div", { class: "heading" },
      el("h2", { tabindex: -1 }, `Item ${item?.name ?? ""}`),
      el("div", { class: "steps" }, el("button", { type: "button", onclick: () => go({ first: undefined, second: undefined }) }, "All items"))),
    el("div", { class: "two" }, [column("first", "First group", 0), column("second", "Second group", 1)]),
  ];
}
