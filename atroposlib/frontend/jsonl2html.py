"""Render a JSONL file of scored groups as one self-contained page; all text from the file is escaped.

Runnable: `python -m atroposlib.frontend.jsonl2html groups.jsonl`.
"""

from __future__ import annotations

import html
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from atroposlib.errors import ConfigError, cli_boundary

logger = logging.getLogger(__name__)

PREVIEW_CHARS = 90


def generate_html(input_path: str | Path, output_path: str | Path | None = None) -> Path:
    """Write the page next to the file (same stem, `.html`), or to `output_path`; return its path.

    Raises ConfigError if the file cannot be read or a line is not a JSON object.
    """
    source = Path(input_path)
    target = Path(output_path) if output_path is not None else source.with_suffix(".html")
    groups = _read(source)
    scores = [_number(score) for group in groups for score in group.get("scores") or []]
    numbers = [score for score in scores if score is not None]
    mean = f", mean score {sum(numbers) / len(numbers):.3f}" if numbers else ""
    write_page(
        target,
        title=source.stem,
        about=f"{len(groups)} groups, {len(scores)} sequences{mean}",
        body="\n".join(create_html_for_group(g, i) for i, g in enumerate(groups)),
    )
    return target


def write_page(target: Path, *, title: str, about: str, body: str) -> None:
    """Write a page; `body` is HTML, the other two are text."""
    page = Template(Path(__file__).with_name("rollouts.html").read_text(encoding="utf-8"))
    filled = page.substitute(title=html.escape(title), about=html.escape(about), body=body)
    target.write_text(filled, encoding="utf-8")


def create_html_for_group(group_data: Mapping[str, Any], index: int) -> str:
    """Return one `<details>` block: scores and prompt in its summary, the sequences inside; "" without sequences.

    A sequence's messages are a list of messages (nested lists are flattened), or one text. If there are more messages
    than scores or the reverse, the rest is dropped and logged.
    """
    scores = group_data.get("scores") or []
    conversations = _conversations(group_data.get("messages"), num_sequences=len(scores))
    if len(conversations) != len(scores):
        logger.warning(
            "group %d: messages of %d sequences, scores of %d; the rest is dropped",
            index,
            len(conversations),
            len(scores),
        )
    inside = []
    for number, (score, messages) in enumerate(zip(scores, conversations, strict=False)):
        body = "\n".join(_message(message) for message in messages)
        inside.append(
            f'<details id="group-{index}-item-{number}"{" open" if number == 0 else ""}><summary>'
            f"{_badge(score)} sequence {number + 1}</summary>"
            f"<div>{body or 'no messages were saved'}</div></details>"
        )
    if not inside:
        return ""
    badges = "".join(_badge(score) for score in scores[: len(inside)])
    preview = html.escape(_preview(conversations[0]))
    return (
        f"<details{' open' if index == 0 else ''}><summary>group {index + 1} {badges}"
        f'<span class="preview">{preview}</span></summary><div>\n{"".join(inside)}\n</div></details>'
    )


def get_score_class(score: Any) -> str:
    """Return the CSS class of a score by its sign; "" if it is not a number."""
    number = _number(score)
    if number is None:
        return ""
    return f"reward-{'positive' if number > 0 else 'negative' if number < 0 else 'zero'}"


def _number(score: Any) -> float | None:
    try:
        return float(score)
    except (TypeError, ValueError):
        return None


def _conversations(messages: Any, *, num_sequences: int) -> list[list[Any]]:
    """Return a list of messages for each sequence."""
    if not messages:
        return [[] for _ in range(num_sequences)]
    if not isinstance(messages, list) or (num_sequences == 1 and isinstance(messages[0], Mapping)):
        messages = [messages]  # one conversation or text, for a group of one
    return [_flat(conversation) for conversation in messages]


def _flat(messages: Any) -> list[Any]:
    """Return the messages of a conversation in order, with nested lists flattened.

    >>> _flat(["a", ["b", [{"role": "user"}]]])
    ['a', 'b', {'role': 'user'}]
    """
    if not isinstance(messages, list):
        return [messages]
    return [message for part in messages for message in _flat(part)]


def _read(source: Path) -> list[dict[str, Any]]:
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {str(source)!r}: {error.strerror}") from error
    groups = []
    # Not splitlines(): U+2028 and similar characters may occur in a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            group = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{source}, line {number}: not JSON: {error}") from error
        if not isinstance(group, dict):
            raise ConfigError(
                f"{source}, line {number}: expected an object, got {type(group).__name__}"
            )
        groups.append(group)
    return groups


def _badge(score: Any) -> str:
    number = _number(score)
    text = html.escape(str(score)) if number is None else f"{number:g}"
    return f'<span class="score {get_score_class(score)}">{text}</span>'


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"<pre>{html.escape(_text(message))}</pre>"
    role = html.escape(str(message.get("role", "")), quote=True)
    text = html.escape(_text(message.get("content")))
    return (
        f'<div class="message {role}"><div class="role">{role.capitalize()}</div>'
        f"<pre>{text}</pre></div>"
    )


def _text(content: Any) -> str:
    """Return a message's text; the parts of a list are joined, and parts without text shown as their type."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(map(_part, content))
    return "" if content is None else str(content)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return f"[{part}]"
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"


def _preview(conversation: Sequence[Any]) -> str:
    """Return the beginning of the first user message or plain text."""
    for message in conversation:
        if isinstance(message, str) or (
            isinstance(message, Mapping) and message.get("role") == "user"
        ):
            content = message if isinstance(message, str) else message.get("content")
            text = " ".join(_text(content).split())
            return text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 3] + "..."
    return ""


def main() -> int:
    """Render the file named on the command line."""
    if len(sys.argv) not in (2, 3):
        raise ConfigError(
            "usage: python -m atroposlib.frontend.jsonl2html GROUPS.jsonl [PAGE.html]"
        )
    sys.stdout.write(f"{generate_html(*sys.argv[1:])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli_boundary(main))
