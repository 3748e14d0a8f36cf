"""Read the answer out of a model's text: after its thinking, in a tag, box or code block, as the letter of a choice.

Pure functions that accept exactly one answer: a text that gives several gives none, so that listing them earns nothing.
All take linear time: repeats are bounded or possessive.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import NamedTuple

THINK_FIRST = (
    "Think about the problem step by step inside <think> </think> tags. Then give your answer."
)
"""System prompt of environments that require thinking."""


class ChoiceQuestion(NamedTuple):
    """A question with options, one of which is right."""

    text: str
    options: list[str]
    letter: str
    subject: str = "none"


BOX = re.compile(r"\\(?:boxed|fbox)\s*+\{")


def after_thinking_once(text: str) -> str | None:
    """Return the text after the thinking; None unless `<think>` and `</think>` occur once each, in this order.

    >>> after_thinking_once("<think>2 + 2</think> 4"), after_thinking_once("4")
    (' 4', None)
    """
    tags = list(re.finditer(r"</?think>", text, re.IGNORECASE))
    if [tag[0].lower() for tag in tags] != ["<think>", "</think>"]:
        return None
    return text[tags[1].end() :]


def solution_of(text: str) -> str:
    """Return the text after the last `</think>`, or all of it without thinking; "" if the thinking does not end.

    >>> solution_of("<think>A?</think> B"), solution_of("<think>A? Or"), solution_of("B")
    (' B', '', 'B')
    """
    said = re.split("</think>", text, flags=re.IGNORECASE)[-1]
    return "" if "<think>" in said.lower() else said


def only_tagged(text: str, tag: str) -> str | None:
    """Return what is inside the only `<tag>...</tag>`, stripped; None without it, or if a second one begins.

    The rule of training, where the form is part of the task.

    >>> only_tagged("so <answer> 3 </answer>", "answer"), only_tagged("<answer>3</answer><answer>4</answer>", "answer")
    ('3', None)
    """
    marks = list(re.finditer(rf"</?{re.escape(tag)}>", text, re.IGNORECASE))
    if [mark[0][1] == "/" for mark in marks] != [False, True]:
        return None
    return text[marks[0].end() : marks[1].start()].strip()


def read_tag(text: str, tag: str) -> str | None:
    """Return what every `<tag>...</tag>` that is not empty contains; None without one, or if two differ.

    The rule of benchmarks, where the content alone counts.

    >>> read_tag("<answer> 3 </answer> ... <answer>3</answer>", "answer")
    '3'
    """
    stated = {*all_tagged(text, tag)} - {""}
    return stated.pop() if len(stated) == 1 else None


def all_tagged(text: str, tag: str) -> list[str]:
    """Return what each `<tag>...</tag>` contains, stripped, for a rule of its own.

    >>> all_tagged("<a>1</a> or <a>2</A> or <a>3", "a")
    ['1', '2']
    """
    closed = re.split(f"</{tag}>", text, flags=re.IGNORECASE)[:-1]
    opened = [re.split(f"<{tag}>", each, maxsplit=1, flags=re.IGNORECASE) for each in closed]
    return [found.strip() for _, *inside in opened for found in inside]


def boxes_in(text: str) -> list[str]:
    """Return the contents of all `\\boxed{...}` that are closed, stripped; a box inside of another is part of that.

    >>> boxes_in(r"\\boxed{1} or \\boxed{\\frac{1}{2}} or \\boxed{3")
    ['1', '\\\\frac{1}{2}']
    """
    opened: list[int | None] = []
    found: list[tuple[int, str]] = []
    for mark in re.finditer(rf"{BOX.pattern}|[{{}}]", text):
        if mark[0] != "}":
            opened.append(None if mark[0] == "{" else mark.end())
        elif opened and (start := opened.pop()) is not None:
            while found and found[-1][0] > start:
                found.pop()
            found.append((start, text[start : mark.start()].strip()))
    return [content for _, content in found]


_FENCE = re.compile(r"((?:[ \t]|[-*+][ \t]|\d++[.)][ \t])*+)(`{3,}+|~{3,}+)([^`]*)")
_FENCE_AT_THE_END = re.compile(r"(?:[^`]++|`[^`]++`(?!`))*+()(`{3,}+)(\w*+)[ \t]*")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language ("" without one) and the content of the fenced blocks that end, in their order.

    A fence is three or more backticks or tildes at the start of a line, also indented or in a list; backticks also at
    its end. The block ends with an equal or longer fence; a fence with a language begins another block.

    >>> code_blocks("Run:\\n```sh\\nls\\n```\\n- ~~~Python\\n  x = 1\\n  ~~~\\n```\\nopen")
    [('sh', 'ls'), ('python', 'x = 1')]
    """
    blocks: list[tuple[str, str]] = []
    lines: list[str] = []
    fence, language, indent = "", "", 0
    for line in text.replace("\r\n", "\n").split("\n"):
        inside = line.lstrip(" \t")
        depth = len(line) - len(inside)
        if fence:
            at_start = inside.startswith(fence)
            is_late = fence[0] == "`" and not at_start and line.rstrip().endswith(fence)
            if not is_late and not (at_start and depth <= indent + 3):
                lines.append(line[min(indent, depth) :])
                continue
            lines += [line.rstrip().rstrip("`")] if is_late else []
            after = "" if is_late else inside.lstrip(fence[0])
            fence = ""
            if not after or after[0] in string.whitespace + string.punctuation:
                blocks.append((language, "\n".join(lines)))
                continue
        if begins := _FENCE.fullmatch(line) or _FENCE_AT_THE_END.fullmatch(line):
            before, fence, info = begins.groups()
            indent, lines = len(before), []
            language = "".join(re.findall(r"\w+", info)[:1]).lower()
    return blocks


def last_block(text: str, *languages: str) -> str | None:
    """Return the last code block after the thinking in one of some languages; None without one.

    A block without a language ("") counts only where no block names one of the others.

    >>> last_block("```py\\nprint(1)\\n```\\nIt prints:\\n```text\\n1\\n```", "python", "py", "")
    'print(1)'
    """
    blocks = [block for block in code_blocks(solution_of(text)) if block[0] in languages]
    named = [block for block in blocks if block[0]]
    return (named or blocks)[-1][1] if blocks else None


def words_of(text: str) -> list[str]:
    """Return the words without case, articles and punctuation.

    >>> words_of("The  U.S. Navy")
    ['us', 'navy']
    """
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def lettered(options: Sequence[str]) -> str:
    """Return one line per option.

    >>> lettered(["red", "blue"])
    'A. red\\nB. blue'
    """
    return "\n".join(
        f"{letter}. {option}"
        for letter, option in zip(string.ascii_uppercase, options, strict=False)
    )


_COMMAND = re.compile(
    r"\\(?:boxed|fbox|emph|underline|text\w*+|math(?:bf|rm|it|sf))\s*+\{((?:[^{}]++|\{[^{}]*+\})*+)\}"
)
_EMPHASIS = re.compile(
    r"(?<![\w*_`$\"'\u201c])[*_`$\"'\u201c]++(?=\S)|(?<=[^\s*_`$\"'\u201d])[*_`$\"'\u201d]++(?!\w)|\\[()\[\]]"
)


def unwrapped(text: str) -> str:
    """Return a text without emphasis, quotes, LaTeX delimiters, boxes and fonts; its minus signs are hyphens.

    >>> unwrapped("**(B)** or $\\\\boxed{\\\\text{B}}$, \N{MINUS SIGN}2 * 3_4")
    '(B) or B, -2 * 3_4'
    """
    for _ in range(4):  # commands inside of commands
        text = _COMMAND.sub(r"\1", text)
    return _EMPHASIS.sub("", text).replace("\N{MINUS SIGN}", "-")


def plain_text(text: str) -> str:
    """Return a text unwrapped, in lower case, without final punctuation and repeated spaces.

    >>> plain_text(' **"New  York".** ')
    'new york'
    """
    return " ".join(unwrapped(text).lower().split()).rstrip(".,;! ")


_ANSWER_IS = re.compile(
    r"(?im)\b(?:(?:the|my|best|correct|right|final)\s++){1,4}"
    r"(?:answer|(?:option|choice)(?=\s++(?:is|was|must|should|would)\b|\s*+:))"
    r"(?:\s++(?:is|was|(?:must|should|would)\s++be)\b)?+"
    r"(?:\s++(?:therefore|thus|then|indeed|clearly|definitely)\b)?+\s*+[:=]?\s*+|^[^\w\n]*+answer\s*+(?:[:=]|is\b:?)\s*+"
)
_SO_IT_IS = re.compile(
    r"(?i)\b(?:(?:it|that)(?:['\u2019]s|\s++is|\s++must\s++be)|therefore|thus|hence|so|"
    r"I(?:['\u2019](?:d|ll)|\s++would|\s++will)?+\s++(?:choose|pick|select|say|go\s++with))\b,?+\s++"
)
_IS_RIGHT = re.compile(
    r"(?im)[\s),]*+is\s++(?:the\s++)?(?:(?:correct|right|best)(?:\s++(?:answer|option|choice|one))?+|answer)\b"
    r"[ \t]*+(?:[.!,;\r]|$)"
)
_DENIED = re.compile(
    r"(?i)(?:\b(?:if|whether|unless|doubt|suppose|assume|assuming|not|cannot)|n['\u2019]t)"
    r"(?:\s+(?:think|believe|say|true|the|case|that|sure|clear)){0,4}\s+$"
)
_OR = re.compile(
    r"(?i)[^.!?\n]{0,40}?\b(?:could|might|may)(?:\s++(?:also|well))?+\s++be\s++|(?:[\s):,/|&+(\u2013\u2014\u2026]|\.{3}|"
    r"-(?!\d))++(?:(?:and/or|or|and)\b\s*+)?+(?:(?:maybe|perhaps|possibly|also)\s++)?+"
)
_OPEN = re.compile(r"(?i)\s*+(?:\?|(?:,\s*+)?or\b)")
_END = re.compile(r"(?m)[ \t]*+(?:[.,;!?)/\r]|$|(?:or|and|are)\b)")
_RATHER = re.compile(
    r"(?i)(?<=[.!?,;:\n(])\s{0,2}(?:(?:or|wait|actually|no|hmm|sorry|rather|instead|correction|maybe|perhaps|"
    r"possibly|alternatively|scratch that|on second thought|(?:it|that)['\u2019]s|it is|I mean|make it)\b\W{1,3}){1,4}"
)
_WRONG = re.compile(
    r"(?i)(?<=[.!?,;:\n(])\s{0,2}(?:wait|no|hmm|actually|sorry)\b\W{1,3}(?:(?:that|this|it)\b|I\s+(?:was|am|made))"
    r"[^.!?\n]{0,20}\b(?:wrong|incorrect|mistaken?|not (?:right|correct))\b"
)
MAX_CHOICE_CHARS = 4000
"""The end of a longer answer is read, so that one that repeats a letter takes little time."""
_NAME = r"(?i:(?:option|choice|letter)\b\s*+:?\s*+)?+"


def last_answer(text: str) -> str | None:
    """Return the rest of the line after the last "the answer is" or "Answer:", unwrapped; None without one.

    >>> last_answer("Is it 7? The answer is **8**.\\nI checked.")
    '8.'
    """
    plain = unwrapped(text)
    ends = [lead.end() for lead in _ANSWER_IS.finditer(plain)]
    return plain[ends[-1] :].partition("\n")[0] if ends else None


def read_choice(text: str, options: Sequence[str]) -> tuple[str | None, str]:
    """Return the letter of the only choice that a text states, and where: `answer_tag`, `stated`, `bare` or `none`.

    The first of these that the text has: `<answer>` tags; statements ("the answer is B", a box); weaker ones ("it's
    B", "B is correct", a last line). Two that differ, an alternative ("B or C") and a retraction give none. Only the
    last `MAX_CHOICE_CHARS` are read.

    >>> read_choice("<answer>(b) blue</answer>", ["red", "blue"]), read_choice("B.", ["red", "blue"])
    (('B', 'answer_tag'), ('B', 'bare'))
    >>> read_choice("The answer is **B**.", ["red", "blue"]), read_choice("The answer is A or B.", ["red", "blue"])
    (('B', 'stated'), (None, 'none'))
    """
    where = "answer_tag" if re.search(r"</?answer>", text, re.IGNORECASE) else ""
    said = ((read_tag(text, "answer") or "") if where else text)[-MAX_CHOICE_CHARS:]
    contents = [plain_text(option) for option in options]
    if letter := _bare_choice(said, contents):
        return letter, where or "bare"
    letter = _stated_choice(said, options, contents)
    return letter, (where or "stated") if letter else "none"


def _bare_choice(text: str, contents: Sequence[str]) -> str | None:
    """Return the letter of a text that is nothing but a choice: its letter, its content, or both."""
    plain = plain_text(text)
    is_letter = len(plain) == 1 and plain in string.ascii_lowercase[: len(contents)]
    if contents.count(plain) == 1 and not is_letter:
        return string.ascii_uppercase[contents.index(plain)]
    separators = r"(?:[\s).:,\]\u2013\u2014]|-(?!\d))*+"
    match = re.fullmatch(rf"{_NAME}[(\[]?([a-z])\b{separators}(.*)", plain, re.DOTALL)
    if match is None or (index := ord(match[1]) - ord("a")) >= len(contents):
        return None
    named = {match[2], match[2].removeprefix("(").removesuffix(")")}
    return match[1].upper() if named & {"", contents[index]} else None


def _stated_choice(text: str, options: Sequence[str], contents: Sequence[str]) -> str | None:
    """Return the letter that all statements of a text agree on; None without one."""
    plain, known = unwrapped(text), string.ascii_uppercase[: len(options)]
    letters = {unwrapped(o).strip().lower(): x for o, x in zip(options, known, strict=False)}
    long = [each for each in letters if not re.fullmatch("[a-z]?", each)]  # "A" is a letter first
    content = "|".join(map(re.escape, sorted(long, key=len, reverse=True))) or "(?!)"
    article = r"(?<=[AI])\s+(?!(?:because|since|as|for|which|is|are|and|or|with)\b)[a-z]"
    choice = re.compile(
        rf"(?<![\w'])(?:((?i:{content}))(?!-?\w|[.,/^*+]\d)|"
        rf"{_NAME}(?:[(\[]([A-Za-z])[)\]]|([A-Z])(?![\w'\u2019]|{article})[)\]]?))"
    )

    def choice_at(start: int) -> tuple[str, int] | None:
        match = choice.match(plain, start)
        if match is None:
            return None
        letter = (match[2] or match[3] or "").upper()
        letter = (
            letter if letter and letter in known else letters.get((match[1] or letter).lower(), "")
        )
        return (letter, match.end()) if letter else None

    def end_of(letter: str, end: int) -> int | None:
        """Return where a stated letter ends, with its content; None if an alternative follows."""
        for _ in range(3):
            joint = _OR.match(plain, end)
            if joint is None or (also := choice_at(joint.end())) is None:
                break
            if also[0] != letter:
                is_listed = re.search("or|[/|&+]", joint[0], re.I) or _END.match(plain, also[1])
                return None if is_listed else end
            end = also[1]
        return None if _OPEN.match(plain, end) else end

    def claims(places: Sequence[tuple[int, int]]) -> list[tuple[str, int, int | None]]:
        """Return what is stated at places (begin of the lead, of the choice): letter, its end, and `end_of`."""
        denied = (_DENIED.search(plain, max(0, lead - 60), lead) for lead, _ in places)
        found = [choice_at(start) for (_, start), no in zip(places, denied, strict=True) if not no]
        return [(*each, end_of(*each)) for each in found if each is not None]

    stated = claims([lead.span() for lead in _ANSWER_IS.finditer(plain)])
    boxes = [_bare_choice(box, contents) for box in boxes_in(text)]
    found = {*(letter for letter, *_ in stated), *boxes} - {None}
    if not found:
        weak = claims([lead.span() for lead in _SO_IT_IS.finditer(plain)])
        stated = [each for each in weak if each[2] is None or _END.match(plain, each[2])]
        starts = [each.start() for each in choice.finditer(plain)]
        named = claims([(i, i) for i in starts if not plain.startswith("or ", i - 3)])
        stated += [each for each in named if each[2] and _IS_RIGHT.match(plain, each[2])]
        lines = [_bare_choice(line, contents) for line in plain.splitlines() if line.strip()]
        found = {*(letter for letter, *_ in stated), *(lines if any(lines[-1:]) else ())} - {None}
    if len(found) != 1 or any(end is None for *_, end in stated):
        return None
    [letter] = found
    first = min((end for _, end, _ in stated), default=len(plain))
    later = (choice_at(each.end()) for each in _RATHER.finditer(plain, first))
    others = [each for each in later if each and each[0] != letter and _END.match(plain, each[1])]
    return None if others or _WRONG.search(plain, first) else letter
