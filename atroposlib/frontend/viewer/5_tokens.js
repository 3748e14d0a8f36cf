// The token view: every token of one sequence, coloured by one figure, with all its figures in a panel.

const TOKENS_AT_ONCE = 4000;

const gapsOf = (sequence) =>
  sequence.trainer.map((logprob, i) => (isNumber(logprob) && isNumber(sequence.sampled?.[i]) ? logprob - sequence.sampled[i] : null));

const yesOrNo = (value) => (value ? "yes" : "no");
const withShare = (logprob) => `${logprob.toFixed(4)} (${figure(100 * Math.exp(logprob))} %)`;
const withRatio = (gap) => `${signed(Number(gap.toFixed(4)))} (ratio ${figure(Math.exp(gap))})`;

/** The colours: name -> [title, value of each token, bounds between the classes, name of the scale in viewer.css, text of a value]. */
function coloursOf(sequence) {
  const logprobBounds = [-0.1, -0.5, -1, -2, -4];
  const colours = {
    trained: ["trained", sequence.trained, null, "trained", yesOrNo],
    sampled: ["sampled logprob", sequence.sampled, logprobBounds, "low", withShare],
    trainer: ["trainer's logprob", sequence.trainer, logprobBounds, "low", withShare],
    gap: ["gap", sequence.trainer && gapsOf(sequence), [-1, -0.3, -0.1, -0.02, 0.02, 0.1, 0.3, 1], "two-sided", withRatio],
    entropy: ["entropy", sequence.entropy, [0.1, 0.5, 1, 2, 3], "high", figure],
    advantage: ["advantage", sequence.token_advantages, [-2, -1, -0.3, -0.001, 0.001, 0.3, 1, 2], "two-sided", signed],
    clipped: ["clipped", sequence.clipped, null, "clipped", yesOrNo],
    version: ["policy version", sequence.versions, null, "version", String],
  };
  return Object.fromEntries(Object.entries(colours).filter(([, [, values]]) => values?.some((value) => value !== null)));
}

/** The classes of a colour in the order of the legend: [{label, css, has(value)}]. */
function classesOf([title, values, bounds, scaleName]) {
  const fromMiddle = (number) => (number === 4 ? "" : `${number < 4 ? "low" : "high"} level-${Math.abs(number - 4)}`);
  const css = (number) => (scaleName === "two-sided" ? fromMiddle(number) : bounds ? `${scaleName} level-${number}` : `${scaleName}-${number}`);
  if (scaleName === "version") {
    const versions = [...new Set(values.filter(isNumber))].sort((a, b) => a - b);
    return versions.map((version, i) => ({ label: `version ${version}`, css: css(i % 6), has: (value) => value === version }));
  }
  if (!bounds) {
    return [
      { label: title, css: css(1), has: (value) => value === 1 },
      { label: `not ${title}`, css: css(0), has: (value) => value === 0 },
    ];
  }
  const isFalling = bounds[0] > bounds[1]; // logprobs: from sure to unlikely
  const edges = isFalling ? [Infinity, ...bounds, -Infinity] : [-Infinity, ...bounds, Infinity];
  return edges.slice(1).map((edge, i) => {
    const [low, high] = isFalling ? [edge, edges[i]] : [edges[i], edge];
    const label = low === -Infinity ? `under ${high}` : high === Infinity ? `over ${low}` : `${low} to ${high}`;
    return { label, css: css(i), has: (value) => isNumber(value) && value >= low && value < high };
  });
}

function tokenView(group, vocabulary) {
  const number = Math.min(Number(state.seq ?? 0) || 0, group.sequences.length - 1);
  const sequence = group.sequences[number];
  const names = group.sequences.map((one, i) => [String(i), `${sequenceName(one, i)} (${figure(one.score)})`]);
  const chooser = tabs(names, String(number), (seq) => go({ seq }), "Sequence");
  if (!sequence.tokens) return [chooser, el("p", {}, "No tokens are stored with this sequence.")];
  const colours = coloursOf(sequence);
  const colour = colours[state.colour] ? state.colour : Object.keys(colours)[0];
  const classes = colour ? classesOf(colours[colour]) : [];
  const titles = Object.entries(colours).map(([name, [title]]) => [name, title]);
  const panel = el("div", { id: "panel", role: "status" }, "Point at a token, tap it, or go with the arrow keys.");
  return [
    chooser,
    figuresOf(sequence),
    titles.length > 0 && tabs(titles, colour, (name) => go({ colour: name }), "Colour"),
    legend(classes, colours[colour]?.[1] ?? []),
    tokenText(sequence, vocabulary, classes, colours[colour]?.[1] ?? [], (i) => panel.replaceChildren(...tokenFigures(sequence, i, vocabulary, colours))),
    panel,
  ];
}

function legend(classes, values) {
  const num = (one) => values.reduce((count, value) => count + (one.has(value) ? 1 : 0), 0);
  return el("ul", { class: "legend" },
    classes.map((one) => el("li", {}, el("span", { class: `swatch ${one.css}` }), `${one.label} `, el("small", {}, figure(num(one))))));
}

/** The tokens as one text. Arrow keys move between them; long texts come in pieces. */
function tokenText(sequence, vocabulary, classes, values, onchoose) {
  const box = el("div", { class: "tokens", dir: "auto", tabindex: 0, role: "group", "aria-label": "Tokens" });
  const make = (i) => tokenElement(sequence, i, vocabulary, classes, values[i]);
  let chosen = -1;
  function choose(i) {
    if (!box.children[i]) return;
    box.children[chosen]?.classList.remove("chosen");
    chosen = i;
    box.children[i].classList.add("chosen");
    onchoose(i);
  }
  const place = (event) => Number(event.target.dataset.place ?? -1);
  box.addEventListener("pointerover", (event) => choose(place(event)));
  box.addEventListener("click", (event) => choose(place(event)));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    choose(chosen + step);
    box.children[chosen]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });
  return [box, showMore(box, sequence.tokens.length, { atOnce: TOKENS_AT_ONCE, noun: "token", make })];
}

const SPECIAL = /^(<\|.*\|>|<[^<>\s]{1,40}>|\[[A-Z_]{2,20}\])$/;
const SIGNS = { "\n": "\u21b5\n", "\r": "\u240d", "\t": "\u21e5\t" };
// Control characters, and those that are not seen or turn the direction of the text.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** A token's text with a sign for what would not be seen. */
function visiblePiece(piece) {
  const visible = piece.replace(UNSEEN, (one) => SIGNS[one] ?? `[U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
  return /^ +$/.test(visible) ? visible.replaceAll(" ", "\u2423") : visible;
}

function tokenElement(sequence, i, vocabulary, classes, value) {
  const id = sequence.tokens[i];
  const piece = vocabulary[id];
  const names = ["token", classes.find((one) => one.has(value))?.css, sequence.trained?.[i] ? "" : "context"];
  if (piece === undefined) names.push("number");
  else if (SPECIAL.test(piece)) names.push("special");
  return el("span", { class: names.filter(Boolean).join(" "), "data-place": i }, piece === undefined ? String(id) : visiblePiece(piece));
}

function tokenFigures(sequence, i, vocabulary, colours) {
  const shown = Object.values(colours).filter(([, values]) => isNumber(values[i]));
  const piece = vocabulary[sequence.tokens[i]];
  return [
    el("p", {}, el("strong", {}, `Token ${figure(i)} of ${figure(sequence.tokens.length)}`), piece === undefined ? "" : el("bdi", {}, el("code", {}, visiblePiece(piece)))),
    facts([["id", sequence.tokens[i]], ...shown.map(([title, values, , , show]) => [title, show(values[i])])]),
  ];
}
