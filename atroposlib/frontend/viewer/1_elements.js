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

const FIRST_PIECE = 20_000;

/** A text as <pre>. What exceeds 20,000 characters is shown on request, so that long lines do not stop the browser. */
function longText(content) {
  const box = el("pre");
  const more = el("button", { type: "button", class: "more", onclick: () => show(shown * 5) });
  let shown = 0;
  function show(length) {
    let end = Math.min(length, content.length);
    if (/[\ud800-\udbff]/.test(content[end - 1] ?? "")) end += 1; // never between the halves of a character
    box.append(content.slice(shown, end));
    shown = end;
    const left = content.length - shown;
    more.textContent = `Show ${figure(Math.min(left, shown * 4))} more of ${figure(content.length)} characters`;
    more.hidden = left <= 0;
  }
  show(FIRST_PIECE);
  return [box, more];
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
  return el("dl", { class: "facts" }, known.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
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
