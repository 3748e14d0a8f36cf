// The difference of two completions, word by word.

const MOST_EDITS = 1500; // memory and time grow with its square
const FOLDED_CHARS = 400; // a longer equal text is folded,
const CONTEXT_CHARS = 120; // except for so much around the changes
const LEAST_SHARED = 0.25; // of texts over 200 characters; with less in common they are not compared

/**
 * Return [{kind: "same" | "removed" | "added", text}] from one list of words to another; null beyond MOST_EDITS.
 * Myers, "An O(ND) difference algorithm" (1986): reach[k] is how far in `before` the diagonal k is reached with d edits.
 */
function editScript(before, after) {
  const offset = MOST_EDITS + 1;
  const reach = new Int32Array(2 * offset + 1);
  const history = [];
  for (let d = 0; d <= MOST_EDITS; d++) {
    history.push(reach.slice(offset - d - 1, offset + d + 2));
    for (let k = -d; k <= d; k += 2) {
      const isAdded = k === -d || (k !== d && reach[offset + k - 1] < reach[offset + k + 1]);
      let x = isAdded ? reach[offset + k + 1] : reach[offset + k - 1] + 1;
      while (x < before.length && x - k < after.length && before[x] === after[x - k]) x += 1;
      reach[offset + k] = x;
      if (x >= before.length && x - k >= after.length) return backtrack(history, before, after);
    }
  }
  return null;
}

function backtrack(history, before, after) {
  const pieces = [];
  let x = before.length;
  let y = after.length;
  for (let d = history.length - 1; d >= 0; d--) {
    const reach = (k) => history[d][k + d + 1];
    const k = x - y;
    const isAdded = k === -d || (k !== d && reach(k - 1) < reach(k + 1));
    const [fromX, fromK] = d === 0 ? [0, 0] : isAdded ? [reach(k + 1), k + 1] : [reach(k - 1), k - 1];
    const fromY = fromX - fromK;
    while (x > fromX && y > fromY) {
      pieces.push({ kind: "same", text: before[--x] });
      y -= 1;
    }
    if (d > 0 && isAdded) pieces.push({ kind: "added", text: after[--y] });
    else if (d > 0) pieces.push({ kind: "removed", text: before[--x] });
  }
  return pieces.reverse();
}

/** Pieces with the number of their change; null where the texts have too little in common. */
function differenceOf(beforeText, afterText) {
  const words = (whole) => whole.match(/([\p{L}\p{N}_]+|[^\s])\s*|\s+/gu) ?? [];
  const [before, after] = [words(beforeText), words(afterText)];
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < Math.min(before.length, after.length) - start && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const script = editScript(before.slice(start, before.length - end), after.slice(start, after.length - end));
  if (!script) return null;
  const same = (list) => ({ kind: "same", text: list.join("") });
  const pieces = joined([same(before.slice(0, start)), ...script, same(before.slice(before.length - end))]);
  const shared = pieces.reduce((sum, { kind, text: { length } }) => sum + (kind === "same" ? length : 0), 0);
  const longest = Math.max(beforeText.length, afterText.length);
  if (longest > 200 && shared < LEAST_SHARED * longest) return null;
  let change = 0;
  return pieces.map((piece, i) => (piece.kind === "same" ? piece : { ...piece, change: i && pieces[i - 1].kind !== "same" ? change : ++change }));
}

function joined(pieces) {
  const runs = [];
  for (const piece of pieces) {
    if (runs.at(-1)?.kind === piece.kind) runs.at(-1).text += piece.text;
    else if (piece.text) runs.push({ ...piece });
  }
  return runs;
}

/** Rows for two columns: lists of pieces, and between them the equal texts to fold. */
function differenceRows(pieces) {
  const rows = [[]];
  pieces.forEach((piece, i) => {
    if (piece.change || piece.text.length <= FOLDED_CHARS) {
      rows.at(-1).push(piece);
      return;
    }
    const before = i > 0 ? piece.text.slice(0, CONTEXT_CHARS).replace(/\S+$/, "") : "";
    const after = i < pieces.length - 1 ? piece.text.slice(-CONTEXT_CHARS).replace(/^\S+\s/, "") : "";
    rows.at(-1).push({ kind: "same", text: before });
    rows.push(piece.text.slice(before.length, piece.text.length - after.length), [{ kind: "same", text: after }]);
  });
  return rows.filter((row) => typeof row === "string" || row.some((piece) => piece.text));
}

function differenceView(group) {
  const last = group.sequences.length - 1;
  const pair = (state.pair ?? "").split(",").map((number, i) => Math.min(number === "" ? i : Number(number) || 0, last));
  const [a, b] = pair.length === 2 ? pair : [pair[0], pair[0] === 0 ? Math.min(1, last) : 0];
  const { completions } = splitPrompt(group);
  const texts = [completions[a], completions[b]].map(flatText);
  const pieces = differenceOf(...texts);
  const names = group.sequences.map((sequence, i) => [String(i), sequenceName(sequence, i)]);
  const heading = (number, choose, label) =>
    el("section", { class: "card" }, el("header", {}, choice(names, String(number), choose, label), figuresOf(group.sequences[number])));
  const column = (runs) => el("pre", { class: "difference" }, blocks(runs));
  const side = (row, kind, tag) =>
    column(row.filter((piece) => piece.kind === "same" || piece.kind === kind).map((piece) => ({ text: piece.text, tag: piece.change && tag, change: piece.change })));
  const rows = pieces ? differenceRows(pieces) : [];
  return [
    el("div", { class: "completions" },
      heading(a, (number) => go({ pair: `${number},${b}` }), "First"),
      heading(b, (number) => go({ pair: `${a},${number}` }), "Second")),
    pieces ? changesBar(pieces.at(-1)?.change ?? pieces.at(-2)?.change ?? 0) : el("p", {}, "These texts have too little in common to be compared word by word."),
    !pieces && el("div", { class: "completions" }, texts.map((whole) => column([{ text: whole }]))),
    rows.map((row) => typeof row === "string"
      ? fold(`${counted(row.length, "equal character")}`, () => longText(row))
      : el("div", { class: "completions" }, side(row, "removed", "del"), side(row, "added", "ins"))),
  ].flat();
}

/** The number of changes, and buttons that walk through them. */
function changesBar(count) {
  if (!count) return el("p", {}, "The texts are equal.");
  const button = (name, distance) => el("button", { type: "button", onclick: () => openChange(distance) }, name);
  return el("div", { class: "row changes", role: "status", "data-count": count, "data-at": 0 },
    el("span", {}, counted(count, "change")), button("Previous (p)", -1), button("Next (n)", 1));
}

/** Go to the change `distance` further; after the last comes the first. */
function openChange(distance) {
  const bar = byId("detail").querySelector(".changes");
  if (!bar) return;
  const { count, at } = bar.dataset;
  bar.dataset.at = ((Number(at) + distance - (at === "0" && distance < 0 ? 0 : 1) + Number(count)) % count) + 1;
  bar.firstChild.textContent = `Change ${bar.dataset.at} of ${count}`;
  for (const mark of document.querySelectorAll(".difference .chosen")) mark.classList.remove("chosen");
  const marks = document.querySelectorAll(`.difference [data-change="${bar.dataset.at}"]`);
  for (const mark of marks) mark.classList.add("chosen");
  marks[0].scrollIntoView({ block: "center" });
}
