// One group: its prompt once, its completions side by side, conversations with tools and reasoning folded.

const isImage = (uri) => typeof uri === "string" && /^data:image\/(png|jpeg);base64,[A-Za-z0-9+/]+={0,2}$/.test(uri);

/** The messages of a sequence; a text alone counts as one without a role. */
const messagesOf = (sequence) => sequence.messages ?? [sequence.text ?? ""];

/** Split what all sequences begin with from what each one adds: {prompt: messages, completions: [messages, ...]}. */
function splitPrompt(group) {
  const all = group.sequences.map(messagesOf);
  if (!all.length) return { prompt: [], completions: [] };
  if (all.every((messages) => messages.length === 1 && typeof messages[0] === "string")) return splitTexts(all.map(([only]) => only));
  const spelled = all.map((messages) => messages.map((message) => JSON.stringify(message)));
  const shortest = Math.min(...spelled.map((messages) => messages.length));
  let shared = 0;
  while (shared < shortest && spelled.every((messages) => messages[shared] === spelled[0][shared])) shared += 1;
  const answer = all[0].findIndex((message) => message.role === "assistant"); // what a model wrote is no prompt, also where all wrote the same
  if (answer >= 0) shared = Math.min(shared, answer);
  else if (shared === shortest) shared = Math.max(0, shared - 1);
  return { prompt: all[0].slice(0, shared), completions: all.map((messages) => messages.slice(shared)) };
}

function splitTexts(texts) {
  let shared = 0;
  if (texts.length > 1) {
    while (shared < texts[0].length && texts.every((one) => one[shared] === texts[0][shared])) shared += 1;
    while (shared > 0 && /\S/.test(texts[0][shared - 1])) shared -= 1; // whole words
  }
  const prompt = texts[0].slice(0, shared);
  return { prompt: prompt ? [prompt] : [], completions: texts.map((one) => [one.slice(shared)]) };
}

/** Messages as one text: for previews and differences. */
function flatText(messages) {
  const ofMessage = (message) =>
    typeof message === "string"
      ? message
      : [message.reasoning_content, contentText(message.content), message.tool_calls && text(message.tool_calls)].filter(Boolean).join("\n");
  return messages.map(ofMessage).join("\n\n");
}

const parts = (content) => (Array.isArray(content) ? content : content === null || content === undefined ? [] : [content]);

function imageOf(part) {
  const { type, media_type, data } = part?.source ?? {};
  return type === "base64" ? `data:${media_type};base64,${data}` : part?.image_url?.url ?? part?.image_url ?? null;
}

const partText = (part) => (typeof part === "string" ? part : typeof part?.text === "string" ? part.text : text(part));
const contentText = (content) => parts(content).map((part) => (isImage(imageOf(part)) ? "" : partText(part))).join("");

const image = (uri) =>
  el("button", { type: "button", class: "image", title: "Enlarge", onclick: (event) => event.currentTarget.classList.toggle("large") },
    el("img", { src: uri, alt: "image of the prompt", loading: "lazy" }));

const ROLES = ["system", "user", "assistant", "tool"];
const CARD_CHARS = 600; // longer results of tools and system prompts are folded

/** A message as a card: its role, the reward of the turn, and its parts in their order. */
function messageBlock(message, reward) {
  if (typeof message === "string") return el("div", { class: "message" }, richText(message));
  const role = ROLES.includes(message.role) ? message.role : "other";
  const title = [role === "tool" ? "result" : String(message.role ?? ""), message.name].filter(Boolean).join(" \u00b7 ");
  const content = contentText(message.content);
  if ((role === "tool" || role === "system") && content.length > CARD_CHARS) {
    const summary = [el("span", { class: "role" }, title), ` ${counted(content.length, "character")}: `, el("bdi", {}, oneLine(content, 60))];
    return fold(summary, () => contentBlocks(message.content, role), { className: `message ${role}` });
  }
  const { reasoning, answer } = role === "assistant" ? splitReasoning(message, content) : { reasoning: "", answer: message.content };
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
  return el("div", { class: `message ${role}` },
    el("div", { class: "role" }, `${title} `, isNumber(reward) && el("span", { class: "reward" }, `reward ${signed(reward)}`)),
    reasoning && fold(`Reasoning, ${counted(reasoning.length, "character")}`, () => longText(reasoning), { className: "reasoning", open: !answer && !calls.length }),
    contentBlocks(answer === content ? message.content : answer, role),
    calls.map((call) => toolCall(call?.function ?? call)));
}

/** The parts of a content in their order: images, texts, and calls that a model wrote as text. */
function contentBlocks(content, role) {
  const ofText = (whole) => {
    if (role === "tool") return longText(whole);
    if (role !== "assistant" || state.raw) return whole && richText(whole);
    const pieces = whole.split(/<tool_call>([^]*?)<\/tool_call>/);
    return pieces.flatMap((piece, i) => (i % 2 ? toolCall(piece) : pieces.length > 1 ? piece.trim() && richText(piece.trim()) : piece && richText(piece)));
  };
  return parts(content).flatMap((part) => (isImage(imageOf(part)) ? image(imageOf(part)) : ofText(partText(part))));
}

/** Reasoning is a field of the message, or what stands before </think> (or after a <think> that was cut off). */
function splitReasoning(message, content) {
  if (message.reasoning_content) return { reasoning: text(message.reasoning_content), answer: content };
  const end = content.indexOf("</think>");
  if (end < 0 && !/^\s*<think>/.test(content)) return { reasoning: "", answer: content };
  const inside = end < 0 ? content : content.slice(0, end);
  return { reasoning: inside.replace(/^\s*<think>\s*/, "").trimEnd(), answer: end < 0 ? "" : content.slice(end + 8).trimStart() };
}

/** A call of a tool: {name, arguments}, or the text of one. */
function toolCall(call) {
  const parsed = (value) => {
    try {
      return typeof value === "string" ? JSON.parse(value) : value;
    } catch {
      return value; // shown as it is
    }
  };
  const { name, arguments: given = {} } = parsed(call) ?? {};
  const inside = name === undefined ? text(call) : text(parsed(given));
  return fold(["Calls ", el("code", {}, oneLine(name ?? "?", 60))], () => longText(inside), { className: "call", open: inside.length <= CARD_CHARS });
}

// The page of a group.

function groupHeading(group, row) {
  const title = group.item_id === null || group.item_id === undefined ? `Group ${oneLine(group.id, 12)}` : `Item ${group.item_id}`;
  const sampled = isNumber(group.policy_version) ? `policy ${group.policy_version}` : null;
  const stale = isNumber(group.staleness) ? `${counted(group.staleness, "step")} stale` : null;
  const place = listed.indexOf(row);
  return el("div", { class: "heading" },
    el("h2", { tabindex: -1 }, title),
    el("div", { class: "steps" },
      el("button", { type: "button", onclick: () => go({ group: undefined, view: undefined }) }, "Back"),
      el("button", { type: "button", disabled: place <= 0, onclick: () => openNeighbour(-1) }, "Previous"),
      el("button", { type: "button", disabled: place < 0 || place + 1 >= listed.length, onclick: () => openNeighbour(1) }, "Next"),
      el("button", { type: "button", onclick: copyLink }, "Copy link")),
    el("p", { class: "about" }, [group.environment, isNumber(group.step) && `step ${group.step}`, sampled, stale, `group ${group.id}`].filter(Boolean).join(" \u00b7 ")),
    group.fate && el("p", { class: group.fate === "trained" ? "about" : "dropped" },
      `Fate: ${group.fate}${isNumber(group.loss_share) ? `, ${percent(group.loss_share)} of the step's gradient` : ""}`),
  );
}

async function copyLink(event) {
  const button = event.currentTarget;
  const link = location.href.split("#")[0] + hashWith({});
  try {
    await navigator.clipboard.writeText(link);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copy it from the address bar";
  }
}

function textView(group) {
  const { prompt, completions } = splitPrompt(group);
  const inMessages = new Set(prompt.flatMap((message) => parts(message.content).map(imageOf)));
  const loose = (group.images ?? []).filter((uri) => isImage(uri) && !inMessages.has(uri));
  const order = group.sequences.map((_, number) => number);
  const by = { score: (sequence) => sequence.score, advantage: (sequence) => sequence.advantage }[state.order];
  const rank = (number) => (isNumber(by(group.sequences[number])) ? by(group.sequences[number]) : -Infinity);
  if (by) order.sort((a, b) => rank(b) - rank(a) || a - b);
  const ofSequence = (number) => group.sequences[number].rollout ?? `sequence ${number}`;
  const rollouts = [...new Set(order.map(ofSequence))].map((rollout) => group.sequences.flatMap((_, number) => (ofSequence(number) === rollout ? [number] : [])));
  const orders = [["", "as sampled"], ["score", "by score"], ["advantage", "by advantage"]];
  return [
    (prompt.length > 0 || loose.length > 0) && el("section", {}, el("h3", {}, "Prompt"), loose.map(image), prompt.map((message) => messageBlock(message))),
    group.gold_answer && el("section", {}, el("h3", {}, "Expected answer"), longText(text(group.gold_answer))),
    el("section", {},
      el("div", { class: "row" }, el("h3", {}, counted(rollouts.length, rollouts.length < completions.length ? "rollout" : "completion")),
        rawSwitch(),
        rollouts.length > 1 && choice(orders, state.order ?? "", (order) => go({ order: order || undefined }), "Order of the completions")),
      el("div", { class: "completions" }, rollouts.map((numbers) => rolloutCard(group, numbers, completions)))),
    group.item !== null && group.item !== undefined && fold("Item", () => longText(text(group.item))),
    Object.keys(group.facts ?? {}).length > 0 && fold("About this group", () => facts(Object.entries(group.facts ?? {}).map(([name, value]) => [name, text(value)]))),
  ];
}

/** A rollout: its sequence, or its sequences in order, each with what the one before it does not have. */
function rolloutCard(group, numbers, completions) {
  if (numbers.length === 1) return el("section", { class: "card" }, sequenceBlocks(group, numbers[0], completions[numbers[0]]));
  const spelled = numbers.map((number) => completions[number].map((message) => JSON.stringify(message)));
  const name = `Rollout ${group.sequences[numbers[0]].rollout + 1}`;
  return el("section", { class: "card rollout" },
    el("header", {}, el("h4", {}, `${name}, ${counted(numbers.length, "sequence")}`)),
    numbers.map((number, part) => {
      const messages = completions[number];
      let known = 0;
      while (part > 0 && known < messages.length && spelled[part][known] === spelled[part - 1][known]) known += 1;
      return el("section", { class: "part" }, sequenceBlocks(group, number, messages, known));
    }));
}

/** What a card shows of a sequence; its first `numKnown` messages, shown before, are folded. */
function sequenceBlocks(group, number, messages, numKnown = 0) {
  const sequence = group.sequences[number];
  const isFirst = state.pair === String(number);
  const compare = () => {
    if (isFirst) go({ pair: undefined });
    else if (state.pair === undefined || state.pair.includes(",")) go({ pair: String(number) });
    else go({ view: "diff", pair: `${state.pair},${number}` });
  };
  const title = isFirst ? "Choose the other" : "Compare";
  const rewards = sequence.turn_rewards ?? [];
  const turns = messages.flatMap((message, place) => (message.role === "assistant" ? [place] : []));
  const rewardOf = (place) => rewards[turns.indexOf(place) - Math.max(0, turns.length - rewards.length)];
  const shown = messages.map((message, place) => () => messageBlock(message, turns.includes(place) ? rewardOf(place) : null));
  return [
    el("header", {}, el("h4", {}, sequenceName(sequence, number)), figuresOf(sequence),
      group.sequences.length > 1 && el("button", { type: "button", "aria-pressed": String(isFirst), onclick: compare }, title)),
    sequence.metrics && facts(Object.entries(sequence.metrics).map(([name, value]) => [name, isNumber(value) ? figure(value) : text(value)])),
    el("div", { class: "messages", tabindex: 0, role: "group", "aria-label": `Text of ${sequenceName(sequence, number)}` },
      numKnown > 0 && fold(`${counted(numKnown, "message")} as in the part before`, () => shown.slice(0, numKnown).map((show) => show())),
      shown.slice(numKnown).map((show) => show())),
  ];
}

const sequenceName = (sequence, number) => [`#${number + 1}`, sequence.label].filter(Boolean).join(" ");

function figuresOf(sequence) {
  const trained = sequence.trained?.reduce((sum, one) => sum + one, 0);
  const length = sequence.tokens && `${counted(sequence.tokens.length, "token")}${sequence.trained ? `, ${figure(trained)} trained` : ""}`;
  const ended = sequence.finish_reason && `ended: ${sequence.finish_reason}`;
  const advantage = isNumber(sequence.advantage) && `advantage ${signed(sequence.advantage)}`;
  return el("p", { class: "figures" }, el("strong", {}, `score ${figure(sequence.score)}`),
    [advantage, ended, length].filter(Boolean).map((part) => el("span", {}, part)));
}
