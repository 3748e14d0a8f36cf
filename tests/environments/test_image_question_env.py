"""Questions about images: what counts as right, what a group holds, and rows of a file."""

import base64
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.scored_data import Strictness, check_group
from tests.builders.rows import write_rows
from tests.environments.helpers_environments import load

pytest.importorskip("PIL")
images = load("image_question_server")


@pytest.fixture
def started(started: Any) -> Any:
    settings = {"dataset_path": None, "num_train_images": 30, "num_eval_rows": 5, "group_size": 2}
    return partial(started, images.ImageQuestionEnv, **settings)


async def test_a_group_has_the_image_of_every_sequence(started: Any) -> None:
    env = await started(["<answer>2</answer>", "<answer>no</answer>"], seed=1)
    item = await env.get_next_item()
    group, _ = await env.collect_trajectories(item)
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.images == [item.image, item.image]
    assert env.server.servers[0].requests[0]["messages"][1]["content"][0] == {
        "type": "image_url",
        "image_url": {"url": item.image},
    }


def test_a_seed_determines_an_image_and_all_kinds_occur() -> None:
    drawn = [images.draw(f"0:train:{i}") for i in range(30)]
    assert images.draw("0:train:7") == drawn[7]
    assert len({question.image for question in drawn}) == 30
    assert {question.kind for question in drawn} == {"count", "colour", "clock"}


@pytest.mark.parametrize("num", [0, 5])
def test_the_answer_to_a_count_is_what_the_picture_shows(num: int) -> None:
    """Every shape has its own cell: the number of coloured regions is the number of shapes drawn."""
    from PIL import Image, ImageDraw

    rng = images.random.Random(num)
    picture = Image.new("RGB", (images.SIZE, images.SIZE), "white")
    images.draw_shapes(ImageDraw.Draw(picture), rng, [("circle", "red")] * num)
    cell = images.SIZE // images.GRID
    centres = [(x * cell + cell // 2, y * cell + cell // 2) for x in range(4) for y in range(4)]
    assert sum(picture.getpixel(centre) == (255, 0, 0) for centre in centres) == num


async def test_rows_of_a_file_name_their_images(started: Any, tmp_path: Path) -> None:
    uri = images.draw("a").image
    (tmp_path / "a.png").write_bytes(base64.b64decode(uri.partition(",")[2]))
    rows = [
        {"image": str(tmp_path / "a.png"), "question": "How many?", "answer": 3},
        {"image": uri, "question": "Which?", "answer": "square"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    paths = {"dataset_path": str(path), "eval_dataset_path": str(path)}
    env = await started("", **paths)
    assert [row.image for row in env.train_rows] == [uri, uri]
    assert [row.answer for row in env.eval_rows] == ["3", "square"]
    (tmp_path / "a.png").write_text("<svg/>")
    with pytest.raises(ConfigError, match=r"a\.png is neither PNG nor JPEG"):
        await started("", **paths)
