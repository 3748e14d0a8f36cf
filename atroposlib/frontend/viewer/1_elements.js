"use strict";
// Elements, numbers and long texts. Data reach the document as text nodes and attributes only, never as HTML.

const byId = (id) => document.getElementById(id);

/** Make an element. Attributes named on* are listeners; null, undefined and false are left out, in children too. */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child || child === 0 || child === ""));
  return element;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Three significant digits; thousands apart for whole numbers; a dash for no number. */
function figure(value) {
  if (!isNumber(value)) return "\u2013";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

const percent = (share) => (isNumber(share) ? `${(100 * share).toFixed(1)} %` : "\u2013");

const signed = (value) => (isNumber(value) && value > 0 ? "+" : "") + figure(value);

/** `1 group`, `2 groups`. */
const counted = (count, noun) => `${figure(count)} ${noun}${count === 1 ? "" : "s"}`;

function mean(values) {
  const numbers = values.filter(isNumber);
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
}

function largest(values) {
  return values.reduce((most, value) => (isNumber(value) && (most === null || value > most) ? value : most), null);
}

const text = (value) => (typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value, null, 2));

/** The first characters of a text on one line. */
const oneLine = (value, length) => value.slice(0, length).replace(/\s+/g, " ") + (value.length > length ? "\u2026" : "");

const BLOCK_CHARS = 8000;
const SHOWN_CHARS = 20_000;

/**
 * Texts as blocks of at most 8,000 characters; runs are [{text, tag, change}], without a tag plain.
 * The browser lays out only the blocks in sight: as one line, a megabyte would stop it for half a minute.
 */
function blocks(runs) {
  const made = [];
  let room = 0;
  for (const { text: whole, tag, change } of runs) {
    for (let start = 0, end; start < whole.length; start = end) {
      if (room === 0) {
        made.push(el("span", { class: "block" }));
        room = BLOCK_CHARS;
      }
      end = start + room;
      if (end < whole.length) {
        const lineEnd = whole.lastIndexOf("\n", end - 1) + 1;
        if (lineEnd > start) end = lineEnd;
        else if (/[\ud800-\udbff]/.test(whole[end - 1])) end += 1; // never between the halves of a character
        room = 0;
      } else {
        end = whole.length;
        room -= end - start;
      }
      const piece = whole.slice(start, end);
      made.at(-1).append(tag ? el(tag, { "data-change": change }, piece) : piece);
    }
  }
  return made;
}

/** A text as <pre>, of long ones the beginning. */
function longText(content) {
  const box = el("pre", {}, blocks([{ text: content.slice(0, SHOWN_CHARS).replace(/[\ud800-\udbff]$/, "") }]));
  if (content.length <= SHOWN_CHARS) return [box];
  const showAll = () => {
    box.replaceChildren(...blocks([{ text: content }]));
    more.remove();
  };
  const more = el("button", { type: "button", class: "more", onclick: showAll }, `Show all ${counted(content.length, "character")}`);
  return [box, more];
}

/** Add the first elements to a box, and return the button that adds more of them until there are `count`. */
function showMore(box, count, { atOnce, noun, make }) {
  const more = el("button", { type: "button", class: "more", onclick: add });
  function add() {
    const end = Math.min(box.children.length + atOnce, count);
    for (let i = box.children.length; i < end; i++) box.append(make(i));
    more.textContent = `Show more of ${counted(count, noun)}`;
    more.hidden = end === count;
  }
  add();
  return more;
}

/** A closed <details> whose inside is made when it is first opened. */
function fold(summary, makeInside, { open = false, className = null } = {}) {
  const box = el("details", { class: className, open, ontoggle: fill }, el("summary", {}, summary));
  function fill() {
    if (box.open && box.children.length === 1) box.append(...[makeInside()].flat());
  }
  fill();
  return box;
}

/** A <dl> of names and values without those that are null. */
function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const shown = (value) => (String(value).length > 300 ? longText(String(value)) : String(value));
  return el("dl", { class: "facts" }, known.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, shown(value)))));
}

/** A <select> with [value, label] options. */
function choice(options, chosen, onchange, label) {
  const items = options.map(([value, name]) => el("option", { value, selected: value === chosen }, name));
  return el("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) }, items);
}

/** Buttons of which one is pressed; [value, label] each. */
function tabs(options, chosen, onchoose, label) {
  const button = ([value, name]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => onchoose(value) }, name);
  return el("div", { class: "tabs", role: "group", "aria-label": label }, options.map(button));
}

/** A table that scrolls where it is too wide; the first cell of a row is its name, numbers are shown as figures. */
function table(titles, rows, css = null) {
  const shown = (cell) => (cell instanceof Node || typeof cell === "string" ? cell : figure(cell));
  const line = ([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell) => el("td", {}, shown(cell))));
  return el("div", { class: "scrolled" }, el("table", { class: css },
    el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, rows.map(line))));
}
