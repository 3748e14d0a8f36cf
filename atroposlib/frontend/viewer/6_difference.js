// The difference of two completions, word by word.

const MOST_EDITS = 1500; // memory and time grow with its square

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

/** {pieces, isWhole}: isWhole is false where the texts differ too much to be compared word by word. */
function differenceOf(beforeText, afterText) {
  const words = (whole) => whole.match(/([\p{L}\p{N}_]+|[^\s])\s*|\s+/gu) ?? [];
  const [before, after] = [words(beforeText), words(afterText)];
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < Math.min(before.length, after.length) - start && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const middle = [before.slice(start, before.length - end), after.slice(start, after.length - end)];
  const script = editScript(...middle);
  const same = (list) => ({ kind: "same", text: list.join("") });
  const replaced = [{ kind: "removed", text: middle[0].join("") }, { kind: "added", text: middle[1].join("") }];
  const pieces = [same(before.slice(0, start)), ...(script ?? replaced), same(before.slice(before.length - end))];
  return { pieces: joined(pieces), isWhole: script !== null };
}

function joined(pieces) {
  const runs = [];
  for (const piece of pieces) {
    if (runs.at(-1)?.kind === piece.kind) runs.at(-1).text += piece.text;
    else if (piece.text) runs.push({ ...piece });
  }
  return runs;
}

function differenceView(group) {
  const last = group.sequences.length - 1;
  const pair = (state.pair ?? "").split(",").map((number, i) => Math.min(number === "" ? i : Number(number) || 0, last));
  const [a, b] = pair.length === 2 ? pair : [pair[0], pair[0] === 0 ? Math.min(1, last) : 0];
  const { completions } = splitPrompt(group);
  const { pieces, isWhole } = differenceOf(flatText(completions[a]), flatText(completions[b]));
  const names = group.sequences.map((sequence, i) => [String(i), sequenceName(sequence, i)]);
  const column = (number, kind, tag, choose, label) =>
    el("section", { class: "card" },
      el("header", {}, choice(names, String(number), choose, label), figuresOf(group.sequences[number])),
      el("pre", { class: "difference" }, blocks(pieces.filter((piece) => piece.kind === "same" || piece.kind === kind)
        .map((piece) => ({ text: piece.text, tag: piece.kind === "same" ? null : tag })))));
  return [
    !isWhole && el("p", {}, "These texts differ too much for a comparison word by word; all between their common ends is marked."),
    el("div", { class: "completions" },
      column(a, "removed", "del", (number) => go({ pair: `${number},${b}` }), "First"),
      column(b, "added", "ins", (number) => go({ pair: `${a},${number}` }), "Second")),
  ];
}
