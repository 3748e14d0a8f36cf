"""Render a JSONL file of scored groups as one self-contained page; all text from the file is escaped.

Runnable: `python -m atroposlib.frontend.jsonl2html groups.jsonl`.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from atroposlib.errors import ConfigError, cli_boundary

PREVIEW_CHARS = 90


def generate_html(input_path: str | Path, output_path: str | Path | None = None) -> Path:
    """Write the page next to the file (same stem, `.html`), or to `output_path`; return its path.

    Raises ConfigError when the file cannot be read or a line is no JSON object.
    """
    source = Path(input_path)
    target = Path(output_path) if output_path is not None else source.with_suffix(".html")
    groups = _read(source)
    scores = [float(score) for group in groups for score in group.get("scores") or []]
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    page = Template(Path(__file__).with_name("rollouts.html").read_text(encoding="utf-8"))
    target.write_text(
        page.substitute(
            title=html.escape(source.stem),
            about=f"{len(groups)} groups, {len(scores)} sequences{mean}",
            groups="\n".join(create_html_for_group(g, i) for i, g in enumerate(groups)),
        ),
        encoding="utf-8",
    )
    return target


def create_html_for_group(group: Mapping[str, Any], index: int) -> str:
    """Return one `<details>` block: scores and the prompt in its summary, the sequences inside."""
    scores = group.get("scores") or []
    conversations = group.get("messages") or [[] for _ in scores]
    inside = []
    for number, (score, messages) in enumerate(zip(scores, conversations, strict=False)):
        body = "\n".join(_message(message) for message in messages)
        inside.append(
            f"<details{' open' if number == 0 else ''}><summary>{_badge(score)} sequence {number + 1}"
            f"</summary><div>{body or 'no messages were saved'}</div></details>"
        )
    badges = "".join(_badge(score) for score in scores)
    preview = html.escape(_preview(conversations))
    return (
        f"<details{' open' if index == 0 else ''}><summary>group {index + 1} {badges}"
        f'<span class="preview">{preview}</span></summary><div>\n{"".join(inside)}\n</div></details>'
    )


def get_score_class(score: float) -> str:
    """Return the colour class: `good` from 0.7, `fair` from 0.3, else `bad`."""
    return "good" if score >= 0.7 else "fair" if score >= 0.3 else "bad"


def _read(source: Path) -> list[dict[str, Any]]:
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {str(source)!r}: {error.strerror}") from error
    groups = []
    for number, line in enumerate(lines, start=1):
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
    return f'<span class="score {get_score_class(float(score))}">{float(score):g}</span>'


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"<pre>{html.escape(str(message))}</pre>"
    role = html.escape(str(message.get("role", "")), quote=True)
    text = html.escape(_text(message.get("content")))
    return f'<div class="message {role}"><div class="role">{role}</div><pre>{text}</pre></div>'


def _text(content: Any) -> str:
    """Return a message's text; parts of a list content follow one another, others are named by type."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"])
            if isinstance(part, Mapping) and "text" in part
            else f"[{_kind(part)}]"
            for part in content
        )
    return "" if content is None else str(content)


def _kind(part: Any) -> str:
    return str(part.get("type", "part")) if isinstance(part, Mapping) else str(part)


def _preview(conversations: Sequence[Any]) -> str:
    for message in conversations[0] if conversations else []:
        if isinstance(message, Mapping) and message.get("role") == "user":
            text = " ".join(_text(message.get("content")).split())
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
