"""The page of a JSONL file of groups or of a run's directory, under the original's names.

Runnable: `python -m atroposlib.frontend.jsonl2html groups.jsonl`. The page is that of `page.py`;
`create_html_for_group` returns a block of HTML for pages of one's own. All text is escaped.
"""

from __future__ import annotations

import html
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError, cli_boundary
from atroposlib.frontend.page import preview
from atroposlib.frontend.run_files import find_run_files, write_run_page
from atroposlib.frontend.view_groups import images_in, text_in, view_of_row


def generate_html(
    input_path: str | Path, output_path: str | Path | None = None, *, tokenizer: Any = None
) -> Path:
    """Write the page to `output_path`; None: next to the file with the suffix `.html`, in a directory `run.html`.

    Returns its path. Raises ConfigError if the file cannot be read or a line is no JSON object.
    """
    source = Path(input_path)
    default = source / "run.html" if source.is_dir() else source.with_suffix(".html")
    target = default if output_path is None else Path(output_path)
    title = f"Rendered Messages - {source.resolve().stem}"
    write_run_page(find_run_files(source), target, title=title, tokenizer=tokenizer)
    return target


def create_html_for_group(group_data: Mapping[str, Any], index: int) -> str:
    """Return one `<details>` block: scores and prompt in its summary, the sequences inside; "" without sequences.

    A sequence's messages are a list of messages (nested lists are flattened), or one text. If there are more messages
    than scores or the reverse, the rest is dropped and logged.
    """
    scores = group_data.get("scores")
    scores = list(scores) if isinstance(scores, list | tuple) else []
    view = view_of_row({**group_data, "scores": scores}, name=f"group {index}")
    if view is None:
        return ""
    inside = []
    for number, sequence in enumerate(view["sequences"]):
        messages = sequence["messages"] or filter(None, [sequence["text"]])
        body = "\n".join(map(_message, messages))
        inside.append(
            f'<details id="group-{index}-item-{number}"{" open" if number == 0 else ""}><summary>'
            f"{_badge(scores[number])} sequence {number + 1}</summary>"
            f"<div>{body or 'no messages were saved'}</div></details>"
        )
    badges = "".join(map(_badge, scores[: len(inside)]))
    first = view["sequences"][0]
    shown = html.escape(preview(first["messages"] or (), first["text"]))
    return (
        f"<details{' open' if index == 0 else ''}><summary>group {index + 1} {badges}"
        f'<span class="preview">{shown}</span></summary><div>\n{"".join(inside)}\n</div></details>'
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
    except (TypeError, ValueError, OverflowError):
        return None


def _badge(score: Any) -> str:
    number = _number(score)
    text = html.escape(str(score)) if number is None else f"{number:g}"
    return f'<span class="score {get_score_class(score)}">{text}</span>'


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"<pre>{html.escape(text_in(message))}</pre>"
    role = html.escape(str(message.get("role", "")), quote=True)
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part for part in parts if isinstance(part, str) or not images_in(part)]
    uris = images_in([part for part in parts if not isinstance(part, str)])
    pictures = "".join(f'<img src="{uri}" alt="image of the message">' for uri in uris)
    text = html.escape(text_in(texts if isinstance(content, list) else content))
    return (
        f'<div class="message {role}"><div class="role">{role.capitalize()}</div>'
        f"{pictures}<pre>{text}</pre></div>"
    )


def main() -> int:
    """Render the file named on the command line; log to stderr how far it is."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if len(sys.argv) not in (2, 3):
        raise ConfigError(
            "usage: python -m atroposlib.frontend.jsonl2html GROUPS.jsonl|RUN_DIRECTORY [PAGE.html]"
        )
    sys.stdout.write(f"{generate_html(*sys.argv[1:])}\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli_boundary(main))
