// The state of a live run's hub and curves of it, drawn anew whenever the page has asked.

const CURVES = [["score", "mean score of the newest group"], ["queued", "queued groups"], ["step", "optimizer step"], ["staleness", "staleness of the oldest queued group"], ["wait_s", "the trainer has waited [s]"]];

function showLive() {
  const box = byId("hub");
  if (!box) return;
  box.replaceChildren(...[...hubState(head.hub), el("div", { class: "charts" }, CURVES.map(([name, title]) => curve(head.points ?? [], name, title)))]);
}

function hubState(hub) {
  if (!hub) return [];
  const ago = (seconds) => (isNumber(seconds) ? duration(seconds) : "");
  const rows = hub.environments.map((one) => [one.name, one.state, ago(one.last_seen_s), figure(one.queued_sequences), figure(one.items_in_flight), ago(one.oldest_item_s)]);
  return [
    el("p", { class: hub.blocker ? "blocked" : "" }, el("strong", {}, hub.batch === "ready" ? "A batch is ready. " : "No batch: "), hub.blocker && hub.reason),
    hub.refusal && el("p", { class: "dropped" }, `Groups are refused: ${hub.refusal}`),
    facts([
      ["step", figure(hub.current_step)], ["policy version", figure(hub.policy_version)], ["queued groups", figure(hub.queued_groups)],
      ["leased batches", figure(hub.leased_batches)], ["active environments", `${figure(hub.num_active)} of ${figure(hub.num_environments)}`],
      ["dead groups", Object.entries(hub.dead).map(([reason, count]) => `${reason} ${count}`).join(", ")],
    ]),
    rows.length > 0 && plainTable(["Environment", "State", "Last seen", "Queued sequences", "Items in flight", "Oldest"], rows),
  ].filter(Boolean);
}

const duration = (seconds) => (seconds < 120 ? `${figure(Math.round(seconds))} s` : `${figure(Math.round(seconds / 60))} min`);

/** A curve over the time of the readings; null without two different numbers. */
function curve(points, name, title) {
  const known = points.filter((point) => isNumber(point[name]));
  const values = known.map((point) => point[name]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (!(low < high)) return null;
  const [from, to] = [known[0].time, known.at(-1).time];
  const at = (point) => `${((300 * (point.time - from)) / (to - from)).toFixed(1)},${(84 - (78 * (point[name] - low)) / (high - low)).toFixed(1)}`;
  const svg = (tag, attributes, ...inside) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  };
  const label = `${title}: ${figure(values.at(-1))}, from ${figure(low)} to ${figure(high)} in ${duration(to - from)}`;
  return el("figure", { class: "curve" }, el("figcaption", {}, `${title} `, el("strong", {}, figure(values.at(-1)))),
    svg("svg", { viewBox: "0 0 300 90", role: "img", "aria-label": label, preserveAspectRatio: "none" }, svg("title", {}, label), svg("polyline", { points: known.map(at).join(" ") })),
    el("small", {}, `${figure(low)} to ${figure(high)}, ${duration(to - from)}`));
}
