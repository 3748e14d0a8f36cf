// The filter expression, such as `score < 0.5 and tokens > 800 and env == "gsm8k"`. It is parsed here, never evaluated as code.

/** Fields by name: what they are, and their value in a row of the index. */
const FIELDS = {
  score: ["number", (row) => index.score_mean[row]],
  score_min: ["number", (row) => index.score_min[row]],
  score_max: ["number", (row) => index.score_max[row]],
  tokens: ["number", (row) => index.tokens_mean[row]],
  characters: ["number", (row) => index.characters_mean[row]],
  rollouts: ["number", (row) => index.num_rollouts[row]],
  sequences: ["number", (row) => index.num_sequences[row]],
  step: ["number", (row) => index.step[row]],
  version: ["number", (row) => index.policy_version[row]],
  staleness: ["number", (row) => index.staleness[row]],
  advantage: ["number", (row) => index.advantage_max[row]],
  gap: ["number", (row) => index.gap_mean[row]],
  loss_share: ["number", (row) => index.loss_share[row]],
  item: ["number or text", (row) => index.item_id[row] ?? index.item[row]],
  env: ["text", (row) => index.environments[index.environment[row]]],
  fate: ["text", (row) => fateOf(row)],
  id: ["text", (row) => index.id[row]],
  suspicious: ["text", (row) => index.suspicious[row]],
  text: ["text", (row) => index.preview[row]],
};

/** A missing value passes no comparison except !=. */
const equal = (value, wanted) => (typeof wanted === "number" ? value !== null && value !== "" && Number(value) === wanted : String(value) === wanted);
const OPERATORS = {
  "==": equal,
  "!=": (value, wanted) => !equal(value, wanted),
  "<": (value, wanted) => isNumber(value) && value < wanted,
  "<=": (value, wanted) => isNumber(value) && value <= wanted,
  ">": (value, wanted) => isNumber(value) && value > wanted,
  ">=": (value, wanted) => isNumber(value) && value >= wanted,
  "~": (value, wanted) => value !== null && value !== undefined && String(value).toLowerCase().includes(String(wanted).toLowerCase()),
};

/** Return a test of a row: a field compared with a value. */
const comparison = (field, sign, wanted) => (row) => OPERATORS[sign](FIELDS[field][1](row), wanted);

/** An error in an expression: what is wrong, and the place of the character. */
const faultAt = (at, message) => Object.assign(new SyntaxError(message), { at });

const PIECE = /(?<word>[A-Za-z_]\w*)|(?<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?<quoted>"[^"]*"|'[^']*')|(?<sign>==|!=|<=|>=|[<>~()])/y;

function piecesOf(source) {
  const pieces = [];
  for (let at = 0; at < source.length; ) {
    PIECE.lastIndex = at;
    const found = PIECE.exec(source);
    if (/\s/.test(source[at])) at += 1;
    else if (found) {
      const [kind, value] = Object.entries(found.groups).find(([, matched]) => matched !== undefined);
      pieces.push({ kind, value, at });
      at += value.length;
    } else if (source[at] === "=") throw faultAt(at, "use == to compare");
    else if (/["']/.test(source[at])) throw faultAt(at, "this text has no closing quote");
    else throw faultAt(at, `${source[at]} is not known here`);
  }
  return [...pieces, { kind: "end", value: "the end", at: source.length }];
}

/** Return a test of a row; throw what `faultAt` makes. */
function parseExpression(source) {
  const pieces = piecesOf(source);
  let place = 0;
  const take = (...values) => (values.includes(pieces[place].value) && pieces[place].kind !== "quoted" ? pieces[place++] : null);
  const expect = (what, isWanted) => {
    if (!isWanted(pieces[place])) throw faultAt(pieces[place].at, `expected ${what}, not ${pieces[place].value}`);
    return pieces[place++];
  };
  function chain(word, next) {
    const parts = [next()];
    while (take(word)) parts.push(next());
    return parts;
  }
  function either() {
    const parts = chain("or", () => chain("and", one));
    return (row) => parts.some((all) => all.every((part) => part(row)));
  }
  function one() {
    if (take("not")) {
      const part = one();
      return (row) => !part(row);
    }
    if (take("(")) {
      const part = either();
      expect(")", ({ value }) => value === ")");
      return part;
    }
    const field = expect("a field", ({ kind }) => kind === "word");
    if (!Object.hasOwn(FIELDS, field.value)) throw faultAt(field.at, `no field ${field.value}: ${Object.keys(FIELDS).join(", ")}`);
    const [type] = FIELDS[field.value];
    const sign = expect(`a comparison (${Object.keys(OPERATORS).join(" ")})`, ({ value }) => Object.hasOwn(OPERATORS, value));
    if (type === "text" && /[<>]/.test(sign.value)) throw faultAt(sign.at, `${field.value} is a text: use ==, != or ~`);
    const isText = ({ kind }) => kind === "quoted" && type !== "number";
    const { kind, value } = expect(type === "text" ? "a text in quotes" : `a ${type}`,
      (piece) => isText(piece) || (piece.kind === "number" && type !== "text"));
    const wanted = kind === "number" ? Number(value) : value.slice(1, -1);
    return comparison(field.value, sign.value, wanted);
  }
  const test = either();
  expect("and, or, or the end", ({ kind }) => kind === "end");
  return test;
}

/** Return {test} or {fault}; {} of no expression. */
function parsedExpression(source) {
  if (!source.trim()) return {};
  try {
    return { test: parseExpression(source) };
  } catch (error) {
    if (error.at === undefined) throw error;
    return { fault: error };
  }
}

/** Show where the expression has a fault, and what may follow it as completions of the field. */
function checkExpression(field) {
  const { fault } = parsedExpression(field.value);
  field.setAttribute("aria-invalid", String(fault !== undefined));
  byId("where-fault").hidden = !fault;
  const start = Math.max(0, (fault?.at ?? 0) - 30);
  byId("where-fault").textContent = fault ? `${field.value.slice(start, start + 40)}\n${" ".repeat(fault.at - start)}^\n${fault.message}` : "";
  byId("words").replaceChildren(...completions(field.value).map((value) => el("option", { value })));
}

/** >>> completions("score < 1 and ste")  // ["score < 1 and step"] */
function completions(source) {
  const [, before, name, sign, after] = /^(.*?)(?:\b(env|fate)\s*(==|!=|~)\s*)?(["\w]*)$/s.exec(source);
  const names = { env: index.environments, fate: index.fates }[name];
  const words = names ? names.map((each) => `"${each}"`) : [...Object.keys(FIELDS), "and", "or", "not"];
  const start = names ? `${before}${name} ${sign} ` : before;
  return words.filter((word) => word.startsWith(after) && word !== after).map((word) => start + word);
}
