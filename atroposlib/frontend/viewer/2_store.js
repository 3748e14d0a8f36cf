// The groups: the index in memory, the chunks unpacked when needed and a few of them kept.

const head = JSON.parse(byId("head").textContent);
const CHUNKS_KEPT = 4;

let index = { id: [], environments: [], fates: [] }; // the columns that Index in page.py names, once they are read
let rowOfId = new Map();
const unpacked = new Map(); // chunk number -> promise of {groups, vocabulary}, the least recently used first
let live = null; // {groups, vocabulary} of a page that polls

function useIndex(columns) {
  index = columns;
  rowOfId = new Map(columns.id.map((id, row) => [id, row]));
}

function bytesOfBase64(encoded) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(encoded);
  return Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
}

/** Unpack base64(gzip(JSON)) to its text. */
function inflate(encoded) {
  const stream = new Blob([bytesOfBase64(encoded)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

/** The text of an element further down, which the browser may still be reading. */
async function textOfElement(id) {
  for (;;) {
    const element = byId(id);
    const isRead = document.readyState !== "loading";
    if (element && (isRead || element.nextElementSibling)) return element.textContent;
    if (isRead) throw new Error(`This file is incomplete: ${id} is missing.`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** The JSON of a chunk: from the server of a run, or unpacked from this file. */
async function chunkText(number) {
  if (!head.chunks) return inflate(await textOfElement(`chunk-${number}`));
  const answer = await fetch(head.chunks + number);
  const content = await answer.text();
  if (!answer.ok) throw new Error(content);
  return content;
}

function chunk(number) {
  if (live) return live;
  const found = unpacked.get(number) ?? chunkText(number).then(JSON.parse);
  unpacked.delete(number);
  unpacked.set(number, found);
  if (unpacked.size > CHUNKS_KEPT) unpacked.delete(unpacked.keys().next().value);
  return found;
}

/** Return {group, vocabulary}; null if the page has no group of that id. */
async function readGroup(id) {
  const row = rowOfId.get(id);
  if (row === undefined) return null;
  const { groups, vocabulary } = await chunk(index.chunk[row]);
  return { group: groups.find((group) => group.id === id), vocabulary };
}

/** Every text of a group that a search looks into. */
function searchedTexts(group) {
  const ofMessage = (message) =>
    typeof message === "string" ? [message] : [text(message.content), message.reasoning_content, message.tool_calls && text(message.tool_calls)];
  const ofSequence = (sequence) => [sequence.text, ...(sequence.messages ?? []).flatMap(ofMessage)];
  return [group.id, group.environment, text(group.item), group.gold_answer, ...group.sequences.flatMap(ofSequence)];
}

const patternOf = (query, flags) => new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), flags);

/** Whether a text contains the query, whatever the case. */
function matcher(query) {
  const pattern = patternOf(query, "iu");
  return (value) => typeof value === "string" && pattern.test(value);
}

// A live page asks its server for the groups after those it has, and for the index of all that the server keeps.

async function poll() {
  const seconds = head.live.every_s;
  try {
    const after = index.id.length ? `?after=${encodeURIComponent(index.id.at(-1))}` : "";
    const answer = await fetch(head.live.poll + after, { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const { head: newHead, index: columns, groups: added, vocabulary } = await answer.json();
    showHead({ ...head, ...newHead });
    byId("live").textContent = "Live";
    if (columns) {
      const known = new Map([...(live?.groups ?? []), ...added].map((group) => [group.id, group]));
      live = { groups: columns.id.map((id) => known.get(id)), vocabulary: { ...live?.vocabulary, ...vocabulary } };
      useIndex(columns);
      showIndex();
    }
  } catch (error) {
    byId("live").textContent = `No answer (${error.message}); asking every ${seconds} s`;
  }
  setTimeout(poll, seconds * 1000);
}
