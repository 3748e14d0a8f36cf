// The state of a live run's hub and curves of it, drawn anew whenever the page has asked.

const CURVES = [["score", "mean score of the newest group"], ["queued", "queued groups"], ["step", "optimizer step"], ["staleness", "staleness of the oldest queued group"], ["wait_s", "the trainer has waited [s]"]];

function showLive() {
  const box = byId("hub");
  if (!box) return;
  charts = [];
  box.replaceChildren(...hubState(head.hub), el("div", { class: "charts" }, CURVES.map(([name, title]) => liveChart(head.points ?? [], name, title))));
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
    rows.length > 0 && table(["Environment", "State", "Last seen", "Queued sequences", "Items in flight", "Oldest"], rows),
  ].filter(Boolean);
}

const duration = (seconds) => (seconds < 120 ? `${figure(Math.round(seconds))} s` : `${figure(Math.round(seconds / 60))} min`);

/** A curve over the seconds since the first reading; null without two different values. */
function liveChart(points, name, title) {
  const known = points.filter((point) => isNumber(point[name]));
  const values = known.map((point) => point[name]);
  if (new Set(values).size < 2) return null;
  const steps = known.map(({ time }) => Math.round(time - points[0].time));
  return chart({ title, curves: [{ run: 0, name: "", steps, values, outliers: [] }], isTime: true }, [steps[0], steps.at(-1)]);
}
