"""Questions about images: count shapes, name the shape of a colour, read a clock.

Pillow draws the images from a seed. A prompt has a PNG and a text as content parts, and the group has the PNG in
`images`, once per sequence, for a trainer that computes its pixels. The answer must be inside the only `<answer>` tag:
1 if right, else -1.

To train, use vLLM, which reports the token ids of prompts with images (SGLang's and TRL's servers do not). In `tokens`
an image is as many placeholder ids as the model has positions for it. `evaluate` works with any API.

Data: generated, or JSONL rows with `image` (a data URI, or the path of a PNG or JPEG file), `question` and `answer`.
Needs: extra images.

    python environments/image_question_server.py process --openai.model_name Qwen/Qwen2.5-VL-3B-Instruct ...
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from atroposlib.envs.answers import only_tagged
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Split
from atroposlib.errors import ConfigError, require

SIZE = 224
"""Width and height of an image in pixels: a multiple of the patch sizes 14, 16 and 28 of common models."""
SHAPES = ("circle", "square", "triangle")
COLOURS = ("red", "green", "blue", "orange", "purple", "black")
GRID = 4
"""Shapes are placed in different cells of a grid with this many rows."""
TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}


class Question(NamedTuple):
    text: str
    answer: str
    image: str
    """A data URI."""
    kind: str = "given"


class ImageQuestionConfig(DatasetEnvConfig):
    tokenizer_name: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    group_size: int = 8
    max_token_length: int = 2048
    num_train_images: int = Field(default=1000, ge=1)
    """Generated training questions."""
    num_eval_rows: int = Field(default=100, ge=0)
    """Generated evaluation questions; with a file, as usual."""


class ImageQuestionEnv(DatasetEnv):
    """Single turn, one image, verifiable reward."""

    name = "image_question"
    env_config_cls = ImageQuestionConfig
    config: ImageQuestionConfig
    system_prompt = (
        "Look at the picture and answer the question. You may reason first. End with the answer alone inside "
        "<answer> </answer> tags: a number, a word, or a time such as 4:05."
    )

    async def load_rows(self, split: Split) -> Any:
        """Draw the images of a split, or read the configured file."""
        if self.config.dataset_path is not None:
            return super().load_rows(split)
        num = self.config.num_train_images if split == "train" else self.config.num_eval_rows
        return await asyncio.to_thread(
            lambda: [draw(f"{self.config.seed}:{split}:{i}") for i in range(num)]
        )

    def parse_row(self, row: dict[str, Any]) -> Question:
        image = row["image"]
        if not image.startswith("data:"):
            image = data_uri(Path(image))
        return Question(text=row["question"], answer=str(row["answer"]), image=image)

    def prompt(self, row: Question) -> list[dict[str, Any]]:
        """Return the system message, and the image followed by the question."""
        parts = [
            {"type": "image_url", "image_url": {"url": row.image}},
            {"type": "text", "text": row.text},
        ]
        return [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": parts},
        ]

    def gold_answer(self, row: Question) -> str:
        return f"<answer>{row.answer}</answer>"

    def score(self, row: Question, answer: str) -> float:
        given = only_tagged(answer, "answer")
        return 1.0 if given is not None and plain(given) == plain(row.answer) else -1.0

    def shape_group(self, row: Question, group: ScoredDataGroup) -> ScoredDataGroup:
        group["images"] = [row.image] * len(group["scores"])
        return group

    def parts_of(self, row: Question) -> list[str]:
        return [f"eval/percent_correct_{row.kind}"]


def plain(answer: str) -> str:
    """Return an answer as it is compared: without case, a final period, and a zero before the hour.

    >>> plain(" Circle. "), plain("04:05"), plain("12:30")
    ('circle', '4:05', '12:30')
    """
    text = answer.strip().removesuffix(".").casefold()
    return re.sub(r"^0(?=\d:\d\d$)", "", text)


def data_uri(image: Path | bytes) -> str:
    """Return a PNG or JPEG file as a data URI; ConfigError for other files."""
    content = image if isinstance(image, bytes) else image.read_bytes()
    kind = next((kind for start, kind in TYPES.items() if content.startswith(start)), None)
    if kind is None:
        raise ConfigError(f"{image!s:.200} is neither PNG nor JPEG")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


@functools.lru_cache(maxsize=4096)
def draw(seed: str) -> Question:
    """Return a question with its image; the same seed gives the same one."""
    rng = random.Random(seed)
    image = require("PIL.Image", extra="images").new("RGB", (SIZE, SIZE), "white")
    pen = require("PIL.ImageDraw", extra="images").Draw(image)
    kind = rng.choice(["count", "colour", "clock"])
    text, answer = {"count": draw_count, "colour": draw_colours, "clock": draw_clock}[kind](
        pen, rng
    )
    file = io.BytesIO()
    image.save(file, format="PNG")
    return Question(text=text, answer=answer, image=data_uri(file.getvalue()), kind=kind)


def draw_count(pen: Any, rng: random.Random) -> tuple[str, str]:
    """Draw shapes of random colours; ask how many of one sort there are."""
    asked = rng.choice(SHAPES)
    others = [shape for shape in SHAPES if shape != asked]
    num = rng.randint(1, 9)
    shapes = [asked] * num + rng.choices(others, k=rng.randint(0, 6))
    draw_shapes(pen, rng, [(shape, rng.choice(COLOURS)) for shape in shapes])
    return f"How many {asked}s are there?", str(num)


def draw_colours(pen: Any, rng: random.Random) -> tuple[str, str]:
    """Draw one shape of every colour; ask for the shape of one."""
    shapes = {colour: rng.choice(SHAPES) for colour in COLOURS}
    draw_shapes(pen, rng, [(shape, colour) for colour, shape in shapes.items()])
    asked = rng.choice(COLOURS)
    return f"Which shape is {asked}: {', '.join(SHAPES)}?", shapes[asked]


def draw_shapes(pen: Any, rng: random.Random, shapes: Sequence[tuple[str, str]]) -> None:
    """Draw (shape, colour) pairs in different cells."""
    cell = SIZE // GRID
    for place, (shape, colour) in zip(rng.sample(range(GRID**2), len(shapes)), shapes, strict=True):
        radius = rng.randint(cell // 4, cell // 2 - 4)
        x, y = ((place % GRID) + 0.5) * cell, ((place // GRID) + 0.5) * cell
        if shape == "circle":
            pen.circle((x, y), radius, fill=colour)
        else:
            sides = {"square": 4, "triangle": 3}[shape]
            pen.regular_polygon((x, y, radius), sides, fill=colour)


def draw_clock(pen: Any, rng: random.Random) -> tuple[str, str]:
    """Draw a clock with two hands, in any size and place; ask for the time."""
    hour, minute = rng.randint(1, 12), rng.randrange(0, 60, 5)
    radius = rng.randint(70, SIZE // 2 - 4)
    x, y = (rng.randint(radius, SIZE - radius) for _ in range(2))

    def at(turn: float, length: float) -> tuple[float, float]:
        angle = 2 * math.pi * turn
        return x + length * math.sin(angle), y - length * math.cos(angle)

    pen.circle((x, y), radius, outline="black", width=3)
    for number in range(1, 13):
        pen.text(
            at(number / 12, 0.85 * radius), str(number), fill="black", anchor="mm", font_size=16
        )
    pen.line([(x, y), at((hour + minute / 60) / 12, 0.45 * radius)], fill="black", width=7)
    pen.line([(x, y), at(minute / 60, 0.7 * radius)], fill="blue", width=3)
    return "What time does the clock show?", f"{hour}:{minute:02}"


if __name__ == "__main__":
    ImageQuestionEnv.cli()
