// The curves of a run, which can be pointed at, zoomed and clicked, and the page of a step with its groups.

const CHART = { width: 360, height: 190, left: 46, right: 10, top: 8, bottom: 22 };
const CHARACTER_PX = 6; // width of one in a mark
const SMOOTHED_STEPS = 10; // as in plot_run.py
const POINTS_DRAWN = 600; // of a curve: more than pixels that it crosses
const GROUPS_OF_STEP = 200;

let charts = []; // the drawn ones, which share the cursor: {pointAt(step)}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Round numbers from low to high, about `count` of them. */
function ticks(low, high, count) {
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= (high - low) / count) ?? 10);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** The least and the largest value, set apart where they are equal. */
function rangeOf(values) {
  const [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const room = low === high ? Math.abs(low) / 2 || 0.5 : 0;
  return values.length ? [low - room, high + room] : [0, 1];
}

/** The place of the value that is nearest to `wanted`. */
const nearest = (values, wanted) =>
  values.reduce((best, value, place) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? place : best), 0);

/** The least and the largest point of each of at most 300 pieces: a thin spike stays in sight. */
function thinned(points) {
  const size = Math.ceil((2 * points.length) / POINTS_DRAWN);
  if (size <= 2) return points;
  const pieces = Array.from({ length: Math.ceil(points.length / size) }, (_, i) => points.slice(i * size, (i + 1) * size).sort((a, b) => a[1] - b[1]));
  return pieces.flatMap((piece) => [piece[0], piece.at(-1)].sort((a, b) => a[0] - b[0]));
}

/** The steps that all charts show: those of the zoom, else from the first to the last. */
function stepsShown() {
  const [from, to] = (state.zoom ?? "").split("-").map(Number);
  if (to > from) return [from, to];
  const steps = (head.charts ?? []).flatMap(({ curves }) => curves.flatMap((curve) => [curve.steps[0], curve.steps.at(-1)]));
  return [Math.min(...steps), Math.max(...steps)];
}

/** What the overview shows of the charts. */
function chartsSection() {
  charts = [];
  const shown = stepsShown();
  const drawn = (head.charts ?? []).map((one) => chart(one, shown));
  if (!drawn.length) return null;
  return el("section", {},
    el("p", { class: "row about" }, "Point for values, drag to zoom, click a step for its groups. Rings are outliers.",
      head.compared && ` Solid: ${head.compared.names[0]}, dashed: ${head.compared.names[1]}.`,
      state.zoom && el("button", { type: "button", onclick: () => go({ zoom: undefined }) }, "Show all steps")),
    el("div", { class: "charts" }, drawn));
}

/** The settings in which two runs differ. */
function settingsSection() {
  if (!head.compared) return null;
  const { names, settings, num_settings: count } = head.compared;
  const title = count ? `Settings that differ: ${figure(settings.length)} of ${figure(count)}` : "Neither run has a recorded configuration.";
  const rows = settings.map(([name, ...values]) => [name, ...values.map((value) => value ?? "not set")]);
  return settings.length ? fold(title, () => table(["Setting", ...names], rows, "settings"), { open: settings.length <= 20 }) : el("p", {}, title);
}

const curveName = (name, run) => (head.compared ? `${name}, ${head.compared.names[run]}` : name);
const openStep = (step) => go({ view: "step", at: step, group: undefined, where: `step == ${step}` });

/** The axes of a diagram: its drawing, and where values are; marks are [value, text]. */
function axes({ title, xs, ys, xMarks, yMarks, size = CHART }) {
  const { width, height, left, right, top, bottom } = size;
  const xOf = (value) => left + ((width - left - right) * (value - xs[0])) / (xs[1] - xs[0] || 1);
  const yOf = (value) => height - bottom - ((height - top - bottom) * (value - ys[0])) / (ys[1] - ys[0]);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": title });
  for (const [value, name] of yMarks) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: yOf(value), y2: yOf(value) }),
      svg("text", { x: left - 5, y: yOf(value) + 4, "text-anchor": "end" }, name));
  }
  for (const [value, name] of xMarks) {
    drawing.append(svg("text", { x: Math.min(xOf(value), width - CHARACTER_PX * name.length / 2), y: height - 6, "text-anchor": "middle" }, name));
  }
  const placeOf = (event) => {
    const box = drawing.getBoundingClientRect();
    return [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height];
  };
  return { drawing, xOf, yOf, placeOf };
}

/** A chart over steps; with `isTime` over seconds, where nothing is opened and the last values stand until one points. */
function chart({ title, is_log: isLog, curves, isTime = false }, [first, last]) {
  const scaled = isLog ? Math.log10 : Number;
  const inSight = (points) => points.filter(([step]) => step >= first && step <= last);
  const raw = curves.map(({ steps, values }) => steps.map((step, i) => [step, scaled(values[i])]));
  const [low, high] = rangeOf(inSight(raw.flat()).map(([, value]) => value));
  const { width, height, left, right, top, bottom } = CHART;
  const isDecades = isLog && high - low >= 2;
  const marks = isDecades ? ticks(low, high, 4).filter(Number.isInteger) : ticks(isLog ? 10 ** low : low, isLog ? 10 ** high : high, 4).map(scaled);
  const markText = (value) => (value && Math.abs(value) < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(3))));
  const { drawing, xOf, yOf, placeOf } = axes({
    title,
    xs: [first, last],
    ys: [low, high],
    xMarks: ticks(first, last === first ? first + 1 : last, 5).filter(Number.isInteger).map((step) => [step, isTime ? duration(step) : String(step)]),
    yMarks: marks.filter(Number.isFinite).map((mark) => [mark, markText(isLog ? 10 ** mark : mark)]),
  });
  const stepAt = (event) => first + ((placeOf(event)[0] - left) / (width - left - right)) * (last - first);
  const line = (points, css) => { // a single point is a dot
    const d = points.map(([step, value], i) => `${i ? "L" : "M"}${xOf(step).toFixed(1)} ${yOf(value).toFixed(1)}`).join("");
    return svg("path", points.length === 1 ? { class: `${css} alone`, d: `${d}Z` } : { class: css, d });
  };
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom });
  const zoomed = svg("rect", { class: "zoomed", y: top, height: height - top - bottom, width: 0 });
  drawing.prepend(zoomed);
  const names = [...new Set(curves.map(({ name }) => name))];
  const cssOf = ({ name, run }) => `curve-${(names.indexOf(name) + run * names.length) % 4} run-${run}`;
  curves.forEach((curve, number) => {
    const css = cssOf(curve);
    let sum = 0;
    const smooth = raw[number].map(([step, value], i) => {
      sum += value - (raw[number][i - SMOOTHED_STEPS]?.[1] ?? 0);
      return [step, sum / Math.min(i + 1, SMOOTHED_STEPS)];
    });
    drawing.append(line(thinned(inSight(raw[number])), `raw ${css}`), line(thinned(inSight(smooth)), css));
    for (const place of curve.outliers.filter((place) => curve.steps[place] >= first && curve.steps[place] <= last)) {
      drawing.append(svg("circle", { class: "outlier", cx: xOf(curve.steps[place]), cy: yOf(scaled(curve.values[place])), r: 4 }));
    }
  });
  drawing.append(cursor);
  const stepShown = el("span", {});
  const values = curves.map(() => el("strong", {}));
  const labels = curves.map((curve, number) => el("span", { class: cssOf(curve) }, `${curveName(curve.name, curve.run)} `, values[number]));
  let at = null; // the step of the cursor
  function pointAt(step) {
    at = step;
    cursor.setAttribute("x1", step === null ? -9 : xOf(step));
    cursor.setAttribute("x2", step === null ? -9 : xOf(step));
    stepShown.textContent = step === null ? "" : isTime ? duration(step) : `step ${step}`;
    curves.forEach((curve, number) => {
      const place = step === null ? -1 : nearest(curve.steps, step);
      values[number].textContent = curve.steps[place] === step ? figure(curve.values[place]) : "";
    });
  }
  const rest = isTime ? last : null;
  pointAt(rest);
  charts.push({ pointAt });
  const pointAll = (step) => charts.forEach((one) => one.pointAt(step));
  const steps = curves.flatMap((curve) => curve.steps);
  const nearestStep = (wanted) => steps[nearest(steps, wanted)];
  let [from, seen] = [null, null]; // the steps where a drag began, and of the cursor then
  const listeners = {
    pointerdown: (event) => {
      if (isTime) return;
      [from, seen] = [stepAt(event), at];
      drawing.setPointerCapture(event.pointerId);
    },
    pointermove: (event) => {
      const wanted = stepAt(event);
      pointAll(nearestStep(wanted));
      if (from === null) return;
      const [start, end] = [from, wanted].sort((a, b) => a - b).map(xOf);
      zoomed.setAttribute("x", start);
      zoomed.setAttribute("width", end - start);
    },
    pointerup: (event) => {
      if (from === null) return;
      const [start, end] = [from, stepAt(event)].sort((a, b) => a - b);
      const isClick = xOf(end) - xOf(start) < 6;
      const step = nearestStep(end);
      // A finger points first, then opens, and does not meet the same step again.
      const chosen = event.pointerType === "mouse" ? step : seen !== null && Math.abs(xOf(seen) - xOf(step)) < 14 ? seen : null;
      from = null;
      if (!isClick) go({ zoom: `${Math.max(first, Math.ceil(start))}-${Math.min(last, Math.floor(end))}` });
      else if (chosen !== null) openStep(chosen);
      else pointAll(step);
    },
    pointercancel: () => {
      from = null;
      zoomed.setAttribute("width", 0);
    },
    pointerleave: ({ pointerType }) => pointerType === "mouse" && from === null && pointAll(rest),
    keydown: ({ key }) => {
      const own = curves[0].steps;
      const place = at === null ? 0 : nearest(own, at);
      const next = { ArrowRight: own[place + (at !== null)], ArrowLeft: own[place - 1] }[key];
      if (next !== undefined) pointAll(next);
      else if (key === "Enter" && at !== null && !isTime) openStep(at);
    },
  };
  for (const [name, listener] of Object.entries(listeners)) drawing.addEventListener(name, listener);
  return el("figure", {}, el("figcaption", {}, title, stepShown), el("p", { class: "curves" }, labels), drawing);
}

/** One step: its figures, and its groups by their share of the loss. */
function stepPage() {
  const step = Number(state.at);
  const found = (head.charts ?? []).flatMap(({ curves }) => curves.flatMap(({ name, run, steps, values, outliers }) => {
    const place = steps.indexOf(step);
    return place < 0 ? [] : [[curveName(name, run), figure(values[place]) + (outliers.includes(place) ? " (outlier)" : "")]];
  }));
  const shares = index.loss_share;
  const weight = (row) => shares[row] ?? index.advantage_max[row] ?? -1;
  const rows = index.id.flatMap((_, row) => (index.step[row] === step ? [row] : [])).sort((a, b) => weight(b) - weight(a));
  const share = (row) => isNumber(shares[row]) && el("span", { class: "share" }, el("span", { style: `width:${Math.min(100, 100 * shares[row])}%` }), `${figure(100 * shares[row])} %`);
  const shown = rows.slice(0, GROUPS_OF_STEP).map((row) =>
    [link(index.preview[row] || index.id[row], { group: index.id[row], view: undefined }), share(row), index.score_mean[row], index.advantage_max[row], index.gap_mean[row]]);
  return [
    el("div", { class: "heading" }, el("h2", {}, `Step ${step}`), el("div", { class: "steps" },
      el("button", { type: "button", onclick: () => go({ view: "run", at: undefined, where: undefined }) }, "Back"),
      el("button", { type: "button", onclick: () => openStep(step - 1) }, "Previous"),
      el("button", { type: "button", onclick: () => openStep(step + 1) }, "Next"))),
    facts(found),
    rows.length ? el("p", { class: "about" }, `${counted(rows.length, "group")}${rows.length > GROUPS_OF_STEP ? `, the first ${GROUPS_OF_STEP}` : ""}, those with the largest share of the loss first`)
      : el("p", {}, "No group here is known to be of this step."),
    rows.length > 0 && table(["Group", "Share of the loss", "Mean score", "Largest advantage", "Gap"], shown),
  ];
}
