// Texts with Markdown, mathematics and code: trees of rendering.py become elements of the tags and attributes below.

const HTML_TAGS = new Set("div p br ul ol li blockquote pre code em strong s hr table thead tbody tr th td span small img".split(" "));
const MATH_TAGS = new Set(("math mrow mi mn mo mtext mspace ms msup msub msubsup mfrac msqrt mroot mover munder munderover mtable mtr mtd " +
  "mstyle menclose mpadded mphantom mmultiscripts mprescripts none").split(" "));
const MATH_ATTRIBUTES = new Set(("display mathvariant stretchy fence separator linethickness columnalign notation accent accentunder movablelimits " +
  "displaystyle scriptlevel minsize maxsize width lspace rspace form").split(" "));

/** Whether an element may have an attribute: classes of viewer.css, numbers of lists, and images in data URLs. */
function mayHave(tag, name, value) {
  if (MATH_TAGS.has(tag)) return MATH_ATTRIBUTES.has(name) && /^[\w .%+-]{1,40}$/.test(value);
  return { class: /^(code|heading-text|code-[a-z])$/.test(value), start: tag === "ol", src: tag === "img" && isImage(value), alt: tag === "img" }[name] ?? false;
}

function built(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [tag, attributes, ...inside] = tree;
  if (!HTML_TAGS.has(tag) && !MATH_TAGS.has(tag)) return document.createTextNode("");
  const element = MATH_TAGS.has(tag) ? document.createElementNS("http://www.w3.org/1998/Math/MathML", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (mayHave(tag, name, String(value))) element.setAttribute(name, value);
  element.append(...inside.map(built));
  return element;
}

let trees = new Map(); // text of the open group -> its tree, null for a text without one
let asked = new Map(); // text -> the boxes that show it until its tree comes

function useTrees(group) {
  trees = new Map();
  asked = new Map();
  addTrees(group);
}

function addTrees(group) {
  for (const [content, tree] of group.rendered ?? []) trees.set(content, tree);
}

const rendered = (tree) => el("div", { class: "rendered", dir: "auto" }, built(tree));

/** A text with its form, or as it is: if the state says so, and where it has none or is too long. */
function richText(content) {
  const raw = longText(content);
  if (state.raw || content.length > SHOWN_CHARS) return raw;
  if (trees.get(content)) return [rendered(trees.get(content))];
  if ((head.render || trees.size) && !/ {2}|\t/.test(content)) raw[0].classList.add("prose"); // else the columns of a text may matter
  if (head.render && content && !trees.has(content)) {
    if (!asked.size) queueMicrotask(askForTrees);
    asked.set(content, [...(asked.get(content) ?? []), raw[0]]);
  }
  return raw;
}

/** Ask the server of the page for the trees of the texts that were just drawn, and put them in place. */
async function askForTrees() {
  const boxes = asked;
  asked = new Map();
  const known = trees;
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify([...boxes.keys()]) };
  const answer = await fetch(head.render, options).catch(() => null);
  if (!answer?.ok) return; // the texts stay as they are
  for (const [content, tree] of await answer.json()) {
    known.set(content, tree);
    if (tree) for (const box of boxes.get(content)) box.replaceWith(rendered(tree));
  }
}

/** The switch between both forms; null where no text of the group has another. */
function rawSwitch() {
  if (!head.render && ![...trees.values()].some(Boolean)) return null;
  return tabs([["", "Rendered"], ["1", "Raw"]], state.raw ?? "", (raw) => go({ raw: raw || undefined }), "Form of the texts");
}
