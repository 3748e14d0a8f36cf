// Where the rewards of a group come from: parts of each score, rewards of the turns, what the grader read and said.

/** What the environment noted of a sequence, in training or in an evaluation. */
const notesOf = (sequence) => ({ ...sequence.notes, ...sequence.metrics });
const hasRewards = (group) => group.sequences.some((sequence) => sequence.turn_rewards || Object.keys(notesOf(sequence)).length > 0);
const asNumber = (value) => (typeof value === "boolean" ? Number(value) : value);

function rewardsView(group) {
  const notes = group.sequences.map(notesOf);
  const isPart = (name) => notes.every((one) => one[name] === undefined || one[name] === null || isNumber(asNumber(one[name])));
  const names = [...new Set(notes.flatMap(Object.keys))];
  const columns = names.filter(isPart);
  const { completions } = splitPrompt(group);
  const rows = group.sequences.map((sequence, number) =>
    [link(sequenceName(sequence, number), { view: undefined, seq: number }), sequence.score, sequence.advantage, ...columns.map((name) => asNumber(notes[number][name]))]);
  const details = group.sequences.flatMap((sequence, number) => {
    const said = names.filter((name) => !isPart(name)).map((name) => [name, text(notes[number][name] ?? "")]);
    const turns = sequence.turn_rewards && rewardsOfTurns(sequence.turn_rewards, completions[number]);
    if (!turns && said.every(([, value]) => !value)) return [];
    return [el("section", { class: "card" }, el("header", {}, el("h4", {}, sequenceName(sequence, number)), figuresOf(sequence)), turns, facts(said))];
  });
  return [
    el("p", { class: "about" }, "The score of each completion beside what the environment noted of it."),
    table(["", "Score", "Advantage", ...columns], rows),
    el("div", { class: "completions" }, details),
  ];
}

/** The reward of each turn beside the beginning of what the model said in it. */
function rewardsOfTurns(rewards, messages) {
  const turns = messages.filter((message) => message.role === "assistant");
  const most = Math.max(...rewards.map((reward) => Math.abs(reward ?? 0))) || 1;
  const bar = (reward) => el("span", { class: reward < 0 ? "share negative" : "share" }, el("span", { style: `width:${(100 * Math.abs(reward ?? 0)) / most}%` }), signed(reward));
  return el("ol", { class: "turns" }, rewards.map((reward, i) => el("li", {}, bar(reward), " ", el("bdi", {}, oneLine(flatText(turns.slice(i, i + 1)), 160)))));
}
