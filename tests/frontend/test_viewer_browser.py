"""The viewer in headless Chromium: stored and live pages, what a person sees and does, and hostile text.

Debian's packages `chromium` and `chromium-driver`; without them the module is skipped and says so.
"""

import base64
import functools
import http.server
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli.environments import main
from atroposlib.cli.view_run import StoredPage, stored_app
from atroposlib.frontend import rendering
from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.frontend.page import Chart, Compared, Curve, Index, row_of, served_page, write_page
from tests.api.helpers_api import serving as serving_app
from tests.builders.rows import write_rows

webdriver = pytest.importorskip("selenium.webdriver", reason="NOT TESTED: the viewer, no selenium")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="NOT TESTED: the viewer, no chromium and chromedriver"
    ),
]

PNG = (
    "data:image/png;base64,"
    + base64.b64encode(
        bytes.fromhex(
            "89504e470d0a1a0a0000000d494844520000000100000001080600000"
            "01f15c4890000000d49444154789c63606060f80f0001040100b6a1e5"
            "3d0000000049454e44ae426082"
        )
    ).decode()
)
PIECES = [
    *("<|im_start|>", "user", "\n", "What", " is", " it", "?", "<|im_end|>", " four", " "),
    "\u202e",
]


def decode(tokens: Any) -> str:
    return "".join(PIECES[token] for token in tokens)


def conversation(question: str, *answers: str) -> list[list[dict[str, Any]]]:
    asked = {"role": "user", "content": question}
    return [[asked, {"role": "assistant", "content": answer}] for answer in answers]


def group(number: int, **changes: Any) -> dict[str, Any]:
    """Return a group of two sequences; the second is the better one."""
    texts = conversation(f"What is {number} + 1?", f"It is {number}.", f"It is {number + 1}.")
    sequences = [
        {"score": score, "advantage": score - 0.5, "finish_reason": end, "messages": messages}
        for score, end, messages in zip([0.0, 1.0], ["length", "stop"], texts, strict=True)
    ]
    fields = {"id": f"g{number}", "item_id": number, "step": number // 10, "environment": "sums"}
    return {**fields, "sequences": sequences, **changes}


def group_with_tokens(number: int) -> dict[str, Any]:
    """Return a group whose first sequence has a prompt of five tokens and four trained ones."""
    group_of_two = group(number)
    group_of_two["sequences"][0] |= {
        "tokens": [0, 1, 2, 3, 4, 8, 9, 10, 7],
        "trained": [0, 0, 0, 0, 0, 1, 1, 1, 1],
        "sampled": [None] * 5 + [-0.05, -0.7, -3.0, -0.01],
        "trainer": [None] * 5 + [-0.05, -1.2, -2.5, -0.01],
        "entropy": [None] * 5 + [0.2, 1.5, 3.5, 0.0],
        "token_advantages": [None] * 5 + [-0.5] * 4,
        "clipped": [0] * 6 + [1, 0, 0],
        "versions": [None] * 5 + [3, 3, 4, 4],
    }
    return group_of_two


def curves(title: str, *values: list[float], outliers: Sequence[int] = ()) -> Chart:
    """Return a chart of curves over the steps from 1; the outliers are in the first."""
    found = [
        Curve(0, f"curve {i}", list(range(1, len(each) + 1)), each, [] if i else list(outliers))
        for i, each in enumerate(values)
    ]
    return Chart(title, is_log=False, curves=found)


class Viewer:
    """A page in the browser, and what a person looks for in it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path | str, state: str = "") -> None:
        address = page if isinstance(page, str) else page.as_uri()
        for url in ("about:blank", f"{address}#{state}"):  # blank, else it would not load again
            self.driver.get(url)
            self.until(lambda url=url: self.run("return location.href").startswith(url[:11]))

    def until(self, is_true: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 20, ignored_exceptions=[Exception]).until(
            lambda _: is_true()
        )

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> Any:
        self.until(lambda: self.all(selector))
        [element] = self.all(selector)
        return element

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def rows(self) -> list[str]:
        """Return the first lines of the rows, from top to bottom."""
        script = """return [...document.querySelectorAll('#rows li')]
            .sort((a, b) => parseFloat(a.style.top) - parseFloat(b.style.top))
            .map(row => row.querySelector('.preview').textContent)"""
        return list(self.driver.execute_script(script))

    def wait_for_rows(self, *rows: str) -> None:
        self.until(lambda: self.rows() == list(rows))

    def button(self, label: str, within: str = "") -> Any:
        return self.until(lambda: next(b for b in self.all(f"{within} button") if b.text == label))

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def inside(self, selector: str) -> str:
        """Return the joined text of elements, also of those out of sight."""
        found = self.all(selector)
        return "".join(self.run("return arguments[0].map(e => e.textContent)", found))

    def state(self) -> str:
        return str(self.driver.execute_script("return location.hash"))

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument("--window-size=1280,900")
    options.page_load_strategy = "none"
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def viewer(chromium: Any) -> Iterator[Viewer]:
    """A browser of 1280 x 900; the test fails if the page logs anything to the console or loads a file."""
    yield Viewer(chromium)
    assert chromium.get_log("browser") == []
    loaded = chromium.execute_script("return performance.getEntriesByType('resource')")
    own = ("/groups", "/chunk/", "/render")
    assert [e["name"] for e in loaded if not any(part in e["name"] for part in own)] == []
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page of 40 groups: every fourth of `words`, every tenth without an advantage."""

    def groups() -> Iterator[dict[str, Any]]:
        for i in range(40):
            changes: dict[str, Any] = {"fate": "trained"}
            if i % 4 == 0:
                changes["environment"] = "words"
            if i % 10 == 9:
                changes["fate"] = "zero_advantage"
            yield group(i, **changes)

    write_page(tmp_path / "run.html", groups(), title="A run", about="sums and words")
    return tmp_path / "run.html"


def written(path: Path, *groups: dict[str, Any], **more: Any) -> Path:
    write_page(path / "page.html", groups, title="t", about="", **more)
    return path / "page.html"


def test_a_stored_page_shows_a_group_with_its_prompt_once(viewer: Viewer, page: Path) -> None:
    viewer.open(page)
    viewer.until(lambda: viewer.rows()[:2] == ["What is 0 + 1?", "What is 1 + 1?"])
    assert viewer.one("#count").text == "40 groups"
    viewer.one("#rows a[data-row='3']").click()
    viewer.until(lambda: "Item 3" in viewer.texts("h2"))
    detail = viewer.one("#detail").text
    assert detail.count("What is 3 + 1?") == 1
    assert viewer.texts(".card pre") == ["It is 3.", "It is 4."]
    assert viewer.texts(".card .figures") == [
        "score 0\nadvantage -0.5\nended: length",
        "score 1\nadvantage +0.5\nended: stop",
    ]
    Select(viewer.one("[aria-label='Order of the completions']")).select_by_value("advantage")
    viewer.until(lambda: viewer.texts(".card pre") == ["It is 4.", "It is 3."])


def test_a_link_to_a_group_opens_it(viewer: Viewer, page: Path) -> None:
    viewer.open(page)
    viewer.one("#rows a[data-row='7']").click()
    viewer.until(lambda: viewer.state() == "#group=g7")
    viewer.open(page, "group=g39")
    viewer.until(lambda: "Item 39" in viewer.texts("h2"))
    assert viewer.one("#rows [aria-current]").text.startswith("What is 39 + 1?")
    viewer.open(page, "group=unknown")
    viewer.until(lambda: "This page has no group unknown." in viewer.one("#detail").text)


def test_filters_and_order_choose_the_rows_and_survive_a_reload(viewer: Viewer, page: Path) -> None:
    viewer.open(page)
    viewer.until(viewer.rows)
    assert viewer.one("#scroller").rect["y"] < 200  # of 900
    assert not viewer.one("[name=item]").is_displayed()
    viewer.one("#more-filters summary").click()
    assert not viewer.one("#clear").is_displayed()
    Select(viewer.one("[name=env]")).select_by_value("words")
    viewer.one("[name=where]").send_keys("step >= 1 and step <= 2")
    expected = [f"What is {i} + 1?" for i in (12, 16, 20, 24, 28)]
    viewer.wait_for_rows(*expected)
    assert viewer.one("#count").text == "5 of 40 groups"
    assert viewer.one("#more-filters summary").text == "Filters \u00b7 env words"
    Select(viewer.one("[name=sort]")).select_by_value("last")
    by_step = [expected[i] for i in (2, 3, 4, 0, 1)]
    viewer.wait_for_rows(*by_step)
    viewer.driver.refresh()
    viewer.wait_for_rows(*by_step)
    viewer.one("#more-filters summary").click()
    viewer.button("Clear the filters").click()
    viewer.until(lambda: viewer.one("#count").text == "40 groups")
    Select(viewer.one("[name=fate]")).select_by_value("zero_advantage")
    viewer.wait_for_rows(*(f"What is {i} + 1?" for i in (9, 19, 29, 39)))
    viewer.one("[name=item]").send_keys("29")
    viewer.wait_for_rows("What is 29 + 1?")
    viewer.one("[name=item]").send_keys(Keys.BACKSPACE)  # a number is not a part of another
    viewer.until(lambda: viewer.one("#count").text == "0 of 40 groups")


EXPRESSIONS = {
    'score < 0.5 and characters > 20 and env == "a"': [0],
    "item == 1": [1],
    "item == 11 or item == 1": [1, 3],
    'item ~ "1"': [1, 3],
    "not (score >= .5)": [0, 4],
    'fate != "trained" and fate != ""': [2, 3, 4],
    "loss_share > 2.5e-1": [1],
    "step >= 1 and step <= 2": [2, 3],
    "score > -1": [0, 1, 2, 3],
    "score != 1": [0, 1, 2, 4],
    "text ~ 'IS 11'": [3],
    "id == 'g1' or env == \"a\" and step == 0": [0, 1],
}
FAULTS = {
    "scor < 1": (0, "no field scor: score, "),
    "score = 1": (6, "use == to compare"),
    "score < ": (8, "expected a number, not the end"),
    'score < "1"': (8, "expected a number"),
    'env > "a"': (4, "env is a text: use ==, != or ~"),
    "env == a": (7, "expected a text in quotes, not a"),
    'env == "a': (7, "this text has no closing quote"),
    "(score < 1": (10, "expected ), not the end"),
    "score < 1 score": (10, "expected and, or, or the end"),
    "score < 1 and": (13, "expected a field, not the end"),
    "score < 1; alert(1)": (9, "; is not known here"),
    "constructor == 1": (0, "no field constructor"),
}


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A page of five groups whose item ids are 0, 1, 2, 11 and "four"."""
    fates = ["trained", "trained", "untrained", "too_long", "not received"]
    groups = [
        group(i, environment="ab"[i % 2], fate=fate, step=None if i == 4 else i // 2 + i // 3)
        for i, fate in enumerate(fates)
    ]
    groups[0] |= {"step": 0, "loss_share": 0.25}
    groups[1] |= {"step": 0, "loss_share": 0.75}
    groups[2]["step"], groups[3]["step"] = 1, 2
    groups[3] |= {**group(11), "id": "g3", "fate": "too_long", "step": 2, "environment": "b"}
    groups[4]["item_id"] = "four"
    for i, scores in enumerate([(0, 0), (0, 1), (0, 2), (1, 1), (None, None)]):
        for sequence, score in zip(groups[i]["sequences"], scores, strict=True):
            sequence["score"] = score
    groups[2]["sequences"][1]["score"] = 1.5
    return written(tmp_path, *groups)


def test_an_expression_filters_exactly_and_is_no_code(viewer: Viewer, few: Path) -> None:
    viewer.open(few)
    viewer.until(viewer.rows)
    for expression, expected in EXPRESSIONS.items():
        viewer.run("go({where: arguments[0]})", expression)
        assert viewer.run("return listed") == expected, expression
        assert viewer.run("return document.querySelector('#where-fault').hidden"), expression


def test_a_fault_of_an_expression_is_shown_at_its_place(viewer: Viewer, few: Path) -> None:
    viewer.open(few)
    viewer.until(viewer.rows)
    field = viewer.one("[name=where]")
    for expression, (place, message) in FAULTS.items():
        field.clear()
        field.send_keys(expression)
        shown = viewer.one("#where-fault").text.split("\n")
        assert shown[0] == expression
        assert shown[1] == " " * place + "^", expression
        assert shown[2].startswith(message), expression
    viewer.until(lambda: viewer.one("#count").text == "5 groups")


def test_names_of_fields_and_values_complete_an_expression(viewer: Viewer, few: Path) -> None:
    viewer.open(few)
    viewer.until(viewer.rows)
    for typed, expected in {
        "sco": ["score", "score_min", "score_max"],
        "score < 1 and ste": ["score < 1 and step"],
        "score < 1 a": ["score < 1 advantage", "score < 1 and"],
        "env == ": ['env == "a"', 'env == "b"'],
        'step > 1 and fate=="t': [
            'step > 1 and fate == "trained"',
            'step > 1 and fate == "too_long"',
        ],
    }.items():
        field = viewer.one("[name=where]")
        field.clear()
        field.send_keys(typed)
        offered = "return [...document.querySelectorAll('#words option')].map(o => o.value)"
        assert viewer.run(offered) == expected, typed


def items_page(path: Path) -> Path:
    """Four items at policy versions 0 to 3, with the scores of their best and mean rollouts."""
    best = {0: [0, 0, 0, 0], 1: [1, 1, 1, 1], 2: [0, 1, 1, 0], 3: [0, 0, 1, 1]}
    groups = []
    for version in range(4):
        for item, scores in best.items():
            one = group(item, id=f"v{version}i{item}", policy_version=version)
            for sequence in one["sequences"]:
                sequence["score"] = float(scores[version])
            groups.append(one)
    return written(path, *groups)


def test_items_never_solved_or_forgotten_are_two_clicks_away(
    viewer: Viewer, tmp_path: Path
) -> None:
    viewer.open(items_page(tmp_path))
    viewer.until(viewer.rows)
    viewer.one("#detail a[href*='items']").click()
    viewer.until(lambda: "Items" in viewer.texts("h2"))
    names = [row.split()[0] for row in viewer.texts(".items tbody tr")]
    assert names == ["0", "2", "3", "1"]
    assert [row.split()[1:4] for row in viewer.texts(".items tbody tr")][0] == ["4", "0.0", "%"]
    assert len(viewer.all(".items tbody tr:first-child .strip a")) == 4
    for label, expected in (
        ("Never solved (1)", ["0"]),
        ("Always solved (1)", ["1"]),
        ("Forgotten (1)", ["2"]),
    ):
        viewer.button(label).click()
        viewer.until(
            lambda expected=expected: (
                [row.split()[0] for row in viewer.texts(".items tbody tr")] == expected
            )
        )
    viewer.one("[aria-label='Solved from a score of']").send_keys(Keys.BACKSPACE * 5, "2", Keys.TAB)
    viewer.until(lambda: viewer.button("Never solved (4)"))


def test_an_item_at_two_policy_versions_stands_side_by_side(viewer: Viewer, tmp_path: Path) -> None:
    viewer.open(items_page(tmp_path), "view=items&items=forgotten")
    viewer.until(lambda: "Items" in viewer.texts("h2"))
    viewer.one(".items tbody th a").click()
    viewer.until(lambda: len(viewer.all(".two > section")) == 2)
    chosen = [
        Select(each).first_selected_option.text
        for each in viewer.all(".two select[aria-label$=group]")
    ]
    assert chosen == ["policy 0, mean score 0", "policy 3, mean score 0"]
    Select(viewer.one("[aria-label='First group']")).select_by_visible_text(
        "policy 2, mean score 1"
    )
    viewer.until(lambda: "first=v2i2" in viewer.state())
    viewer.press(Keys.ESCAPE)
    viewer.until(lambda: "Items" in viewer.texts("h2"))
    assert "items=forgotten" in viewer.state()


def test_the_items_of_50_000_groups_are_paged(viewer: Viewer, tmp_path: Path) -> None:
    def groups() -> Iterator[dict[str, Any]]:
        for i in range(50_000):
            sequences = [{"score": float((i * 7 + j) % 3 == 0), "text": "a"} for j in range(2)]
            yield {"id": f"g{i}", "item_id": i % 2000, "step": i // 128, "sequences": sequences}

    write_page(tmp_path / "p.html", groups(), title="t", about="")
    viewer.open(tmp_path / "p.html", "view=items")
    viewer.until(lambda: "Items" in viewer.texts("h2"))
    assert len(viewer.all(".items tbody tr")) == 50
    viewer.until(lambda: "1 of 40" in viewer.one("#detail").text)
    viewer.button("Next page").click()
    viewer.until(lambda: "2 of 40" in viewer.one("#detail").text)
    timed = "const began = performance.now(); {}; return performance.now() - began"
    for what, limit_ms in {
        "itemsOf.of = null; go({page: 3})": 1000,
        "go({where: 'score < 0.5 and step > 100 and item != 5'})": 300,
        "go({where: undefined, sort: 'low'})": 300,
    }.items():
        took_ms = viewer.run(timed.format(what))
        print(what, took_ms, "ms")
        assert took_ms < 4 * limit_ms  # of a busy machine


def test_the_overview_shows_how_scores_and_lengths_are_spread(
    viewer: Viewer, tmp_path: Path
) -> None:
    groups = [
        {"id": f"g{i}", "sequences": [{"score": i / 10, "text": "a" * (1 + i % 3)}]}
        for i in range(11)
    ]
    viewer.open(written(tmp_path, *groups))
    viewer.until(lambda: viewer.texts("figcaption") == ["Mean score", "Mean characters"])
    bars = viewer.all("figure:first-of-type .bars a")
    assert len(bars) == 20
    counts = [int(bar.get_attribute("title").split(": ")[1].split()[0]) for bar in bars]  # type: ignore[union-attr]
    assert sum(counts) == 11
    for number in (6, 19):
        viewer.run("arguments[0].click()", viewer.all("figure:first-of-type .bars a")[number])
        shown = f"{counts[number]} of 11 groups"
        viewer.until(lambda shown=shown: viewer.one("#count").text == shown)
        viewer.run("go({where: undefined, view: 'run'})")
        viewer.until(lambda: viewer.all(".bars"))
    assert [row.split()[-2] for row in viewer.texts("tbody tr")] == [
        "0",
        "0.1",
        "0.2",
        "1",
        "0.9",
        "0.8",
    ]


def test_controls_that_change_nothing_are_hidden(viewer: Viewer, tmp_path: Path) -> None:
    groups = [group(i, environment="sums", step=None) for i in range(3)]
    for each in groups:
        for sequence in each["sequences"]:
            sequence |= {"score": 1.0, "advantage": None}
    viewer.open(written(tmp_path, *groups))
    viewer.until(viewer.rows)
    viewer.one("#more-filters summary").click()
    shown = [field for field in viewer.all("#filters [name]") if field.is_displayed()]
    assert [field.get_attribute("name") for field in shown] == ["q", "sort", "where", "item"]
    values = [option.get_attribute("value") for option in Select(shown[1]).options]
    assert values == ["", "high", "low", "spread", "long"]
    viewer.open(tmp_path / "page.html", "env=words")
    viewer.until(lambda: viewer.one("#count").text == "0 of 3 groups")
    viewer.one("#more-filters summary").click()
    assert viewer.one("[name=env]").is_displayed()


def test_groups_are_filtered_by_score_and_sorted_by_advantage(
    viewer: Viewer, tmp_path: Path
) -> None:
    groups = [group(i) for i in range(4)]
    for i, scores in enumerate([(0, 0), (0, 1), (1, 1), (0, 4)]):
        for sequence, score in zip(groups[i]["sequences"], scores, strict=True):
            sequence |= {"score": float(score), "advantage": score - sum(scores) / 2}
    viewer.open(written(tmp_path, *groups), "sort=advantage&where=score>=0.5 and score<=2")
    viewer.wait_for_rows("What is 3 + 1?", "What is 1 + 1?", "What is 2 + 1?")


def test_search_finds_text_beyond_the_preview_in_every_chunk(
    viewer: Viewer, tmp_path: Path
) -> None:
    groups = [group(i) for i in range(200)]
    for i in (3, 160):
        groups[i]["sequences"][1]["messages"][-1]["content"] = 'far on: a "Needle"\u00e9 in the hay'
    viewer.open(written(tmp_path, *groups))
    viewer.until(viewer.rows)
    viewer.press("/", "a needle")
    viewer.until(lambda: viewer.one("#count").text == "0 of 200 groups")
    viewer.one("[name=q]").send_keys(Keys.CONTROL, "a", Keys.NULL, '"needle"\u00c9')
    viewer.wait_for_rows("What is 3 + 1?", "What is 160 + 1?")
    assert not viewer.one("#scan").is_displayed()
    viewer.one("#rows a[data-row='160']").click()
    viewer.until(lambda: viewer.run("return CSS.highlights.get('searched')?.size") == 1)


def test_a_search_can_be_stopped(viewer: Viewer, tmp_path: Path) -> None:
    viewer.open(written(tmp_path, *(group(i) for i in range(3000))))
    viewer.until(viewer.rows)
    viewer.run("go({q: 'no such text'})")  # a click on the button lands in the same task
    assert viewer.run("return !document.getElementById('scan').hidden")
    viewer.run("go({q: 'nor this'}); document.getElementById('scan-cancel').click()")
    viewer.until(lambda: "search stopped at" in viewer.one("#count").text)
    assert not viewer.one("#scan").is_displayed()


def test_keys_walk_through_the_groups(viewer: Viewer, page: Path) -> None:
    viewer.open(page)
    viewer.until(viewer.rows)
    viewer.press("jjj")
    viewer.until(lambda: viewer.state() == "#group=g2")
    viewer.press("k", Keys.ARROW_DOWN, Keys.ARROW_UP, "k")
    viewer.until(lambda: viewer.state() == "#group=g0")
    viewer.press("?")
    viewer.until(lambda: viewer.one("#keys").is_displayed())
    viewer.press(Keys.ESCAPE)
    viewer.until(lambda: not viewer.one("#keys").is_displayed())
    viewer.press("/", "39j")
    viewer.until(lambda: "q=39j" in viewer.state())
    viewer.press(Keys.ESCAPE, Keys.ESCAPE)
    viewer.until(lambda: "group" not in viewer.state())
    assert viewer.one("#detail h2").text == "Overview"


def test_tokens_show_every_figure_and_no_colour_is_alone(viewer: Viewer, tmp_path: Path) -> None:
    page = written(tmp_path, group_with_tokens(1), decode=decode)
    viewer.open(page, "group=g1")
    viewer.until(lambda: viewer.all(".card"))
    viewer.press("t")
    viewer.until(lambda: len(viewer.all(".token")) == 9)
    pieces = [viewer.run("return arguments[0].textContent", t) for t in viewer.all(".token")]
    assert pieces == [
        *("<|im_start|>", "user", "\u21b5\n", "What", " is", " four", "\u2423", "[U+202E]"),
        "<|im_end|>",
    ]
    assert viewer.texts(".token.special") == ["<|im_start|>", "<|im_end|>"]
    assert len(viewer.all(".token.context")) == 5
    assert viewer.texts(".legend li") == ["trained 4", "not trained 5"]
    ActionChains(viewer.driver).move_to_element(viewer.all(".token")[6]).perform()
    panel = viewer.one("#panel").text.replace("\n", " ")
    assert panel == (
        "Token 6 of 9 \u2423 id 9 trained yes sampled logprob -0.7000 (49.7 %) "
        "trainer's logprob -1.2000 (30.1 %) gap -0.5 (ratio 0.607) entropy 1.5 advantage -0.5 "
        "clipped yes policy version 3"
    )
    viewer.one(".tokens").send_keys(Keys.ARROW_RIGHT)
    assert viewer.one("#panel").text.startswith("Token 7 of 9")
    assert viewer.one(".token.chosen").text == "[U+202E]"


def test_colours_of_tokens_follow_their_figures(viewer: Viewer, tmp_path: Path) -> None:
    viewer.open(written(tmp_path, group_with_tokens(1), decode=decode), "group=g1&view=tokens")
    seen = {}
    labels = viewer.until(lambda: viewer.texts("[aria-label=Colour] button"))
    for label in labels:
        viewer.button(label, "[aria-label=Colour]").click()
        assert viewer.texts("[aria-label=Colour] [aria-pressed=true]") == [label]
        seen[label] = [text for text in viewer.texts(".legend li") if not text.endswith(" 0")]
    assert seen == {
        "trained": ["trained 4", "not trained 5"],
        "sampled logprob": ["over -0.1 2", "-1 to -0.5 1", "-4 to -2 1"],
        "trainer's logprob": ["over -0.1 2", "-2 to -1 1", "-4 to -2 1"],
        "gap": ["-1 to -0.3 1", "-0.02 to 0.02 2", "0.3 to 1 1"],
        "entropy": ["under 0.1 1", "0.1 to 0.5 1", "1 to 2 1", "over 3 1"],
        "advantage": ["-1 to -0.3 4"],
        "clipped": ["clipped 1", "not clipped 8"],
        "policy version": ["version 3 2", "version 4 2"],
    }
    backgrounds = viewer.run(
        "return [...document.querySelectorAll('.token')]"
        ".map(token => getComputedStyle(token).backgroundColor)"
    )
    assert backgrounds[4] == "rgba(0, 0, 0, 0)"
    assert backgrounds[5] == backgrounds[6] != backgrounds[7] == backgrounds[8]
    viewer.press("c")
    viewer.until(lambda: "colour=trained" in viewer.state())


def test_two_completions_are_compared_word_by_word(viewer: Viewer, tmp_path: Path) -> None:
    texts = ["We add 2 and 2, so it is 4.", "So: 5", "We add 2 to 2, so it is 5."]
    sequences = [
        {"score": float(i), "messages": messages}
        for i, messages in enumerate(conversation("2 + 2?", *texts))
    ]
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g")
    viewer.until(lambda: len(viewer.all(".card")) == 3)
    viewer.all(".card header button")[0].click()
    viewer.button("Choose the other")
    viewer.all(".card header button")[2].click()
    viewer.until(lambda: viewer.texts(".difference") == [texts[0], texts[2]])
    assert [text.strip() for text in viewer.texts("del")] == ["and", "4"]
    assert [text.strip() for text in viewer.texts("ins")] == ["to", "5"]
    assert "pair=0%2C2" in viewer.state()
    Select(viewer.one("[aria-label=Second]")).select_by_value("1")
    viewer.until(lambda: viewer.texts(".difference") == [texts[0], texts[1]])


@pytest.mark.parametrize("num_words", [30, 5000])
def test_texts_with_little_in_common_are_shown_side_by_side(
    viewer: Viewer, tmp_path: Path, num_words: int
) -> None:
    texts = [" ".join(f"{letter}{10**12 + i} the" for i in range(num_words)) for letter in "ab"]
    sequences = [{"score": 0.0, "messages": messages} for messages in conversation("?", *texts)]
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g&view=diff")
    viewer.until(lambda: "too little in common" in viewer.one("#detail").text)
    columns = "return [...document.querySelectorAll('.difference')].map(e => e.textContent)"
    assert viewer.run(columns) == texts
    assert viewer.all("del, ins") == []


def test_changes_are_counted_and_visited_and_equal_parts_folded(
    viewer: Viewer, tmp_path: Path
) -> None:
    filler = [f"word{i} " for i in range(2000)]
    changed = filler.copy()
    changed[500], changed[1500] = "other ", "last "
    changed.insert(1000, "added ")
    texts = ["".join(filler), "".join(changed)]
    sequences = [{"score": 0.0, "messages": messages} for messages in conversation("?", *texts)]
    sequences.append(sequences[0])
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g&view=diff")
    viewer.until(lambda: viewer.all(".changes"))
    assert viewer.one(".changes span").text == "3 changes"
    assert viewer.texts("del") == ["word500 ", "word1500 "]
    assert viewer.texts("ins") == ["other ", "added ", "last "]
    folded = viewer.all("#detail > details")
    assert len(folded) == 4
    assert "equal characters" in folded[0].text
    shown = sum(map(len, viewer.texts(".difference")))
    assert 6 * 100 < shown < 6 * 300  # of 2 * 17,000
    for keys, said, marks in [
        ("n", "Change 1 of 3", ["word500", "other"]),
        ("nn", "Change 3 of 3", ["word1500", "last"]),
        ("n", "Change 1 of 3", ["word500", "other"]),
        ("pp", "Change 2 of 3", ["added"]),
    ]:
        viewer.press(keys)
        viewer.until(lambda said=said: viewer.one(".changes span").text == said)
        assert [text.strip() for text in viewer.texts(".chosen")] == marks
    in_sight = "const {top, bottom} = arguments[0].getBoundingClientRect(); return top > 0 && bottom < innerHeight"
    assert viewer.run(in_sight, viewer.one(".chosen"))
    folded[1].find_element(By.TAG_NAME, "summary").click()
    viewer.until(lambda: "word700 " in folded[1].text)
    viewer.run("go({pair: '0,2'})")
    viewer.until(lambda: "The texts are equal." in viewer.one("#detail").text)
    viewer.press("n")


EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def test_hostile_text_is_shown_as_text(viewer: Viewer, tmp_path: Path) -> None:
    answers = [
        EVIL,
        "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
        "\U0001f469\u200d\U0001f680 \U0001f1e8\U0001f1ed",
        "a\u202eb",
    ]
    sequences = [
        {"score": 1.0, "messages": messages, "finish_reason": EVIL, "metrics": {EVIL: EVIL}}
        for messages in conversation(EVIL, *answers)
    ]
    odd = {"role": EVIL, "name": EVIL, "content": [{"type": EVIL}, {"text": EVIL}]}
    call = {"function": {"name": EVIL, "arguments": EVIL}}
    sequences[0]["messages"] += [odd, {"role": "assistant", "content": None, "tool_calls": [call]}]
    fields = {"environment": EVIL, "fate": EVIL, "item": EVIL, "facts": {EVIL: EVIL}}
    shown = {**fields, "id": EVIL, "gold_answer": EVIL, "images": [EVIL], "sequences": sequences}
    charts = [Chart(EVIL, False, [Curve(0, EVIL, [1, 2], [0.0, 1.0], [])])]
    write_page(tmp_path / "p.html", [shown, group(2)], title=EVIL, about=EVIL, charts=charts)
    viewer.open(tmp_path / "p.html")
    viewer.one("#rows a[data-row='0']").click()
    viewer.until(lambda: viewer.all(".card"))
    for summary in viewer.all("#detail summary"):
        summary.click()
    texts = viewer.run("return [...document.querySelectorAll('.card pre')].map(p => p.textContent)")
    assert set(answers) <= set(texts)
    assert viewer.one("#title").text == EVIL
    assert EVIL in viewer.one("#detail").text
    for view in ("diff", "tokens", "rewards", "text"):
        viewer.run("go({view: arguments[0], q: arguments[1]})", view, EVIL)
        viewer.until(lambda: viewer.one("#count").text == "1 of 2 groups")
    assert viewer.run("return window.hacked ?? null") is None
    assert viewer.all("#detail script, #detail img, #rows img, header img") == []


HOSTILE = (
    "<script>alert(1)</script> **a**",
    "<img src=x onerror=alert(1)> **a**",
    "<svg onload=alert(1)><script>alert(1)</script></svg> **a**",
    "[x](javascript:alert(1)) [y](data:text/html;base64,PHNjcmlwdD4=) [z](vbscript:x) **a**",
    '[x](https://example.com "\' onmouseover=alert(1)") <https://example.com>',
    "![x](https://example.com/x.png) ![y](data:image/svg+xml;base64,PHN2Zz4=) **a**",
    '![x](javascript:alert(1) "onerror=alert(1)") **a**',
    "<math><annotation-xml encoding='text/html'><script>alert(1)</script></annotation-xml></math> **a**",
    r"$\text{</mtext><script>alert(1)</script>} \href{javascript:alert(1)}{x}$",
    r"$\style{background:url(https://example.com)}{x}\class{chosen}{y}\cssId{panel}{z}$",
    r"$\color{red;background:url(https://example.com)}x \hspace{1px;position:fixed}$",
    r"$\unicode{x3c}script\unicode{x3e} \mathchoice{a}{b}{c}{d} \html{x}$",
    "```html\n<script>alert(1)</script>\n```",
    '```"><script>alert(1)</script>\nx\n```',
    "<style>*{display:none}</style><link rel=stylesheet href=//example.com> **a**",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe> **a** &lt;script&gt;",
    "| <script>alert(1)</script> |\n|---|\n| <img onerror=alert(1)> |",
)


def test_rendered_texts_have_elements_and_attributes_of_the_lists_alone(
    viewer: Viewer, tmp_path: Path
) -> None:
    sequences = [{"score": 1.0, "messages": m} for m in conversation("**Asked**", *HOSTILE)]
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g")
    viewer.until(lambda: len(viewer.all(".card")) == len(HOSTILE))
    assert len(viewer.all(".card .rendered")) >= 12
    found = """return [...document.querySelectorAll('.rendered *')].flatMap(e => [e.localName, ...[...e.attributes]
        .map(a => `${e.localName} ${a.name}=${a.value}`)])"""
    names = set(viewer.run(found))
    assert {"strong", "math", "mtext", "table", "pre"} <= names
    bad = ("script", "iframe", "style", "link", "svg", "annotation-xml", "a", "object", "form")
    assert names.isdisjoint(bad)
    attributes = {name.partition("=")[0].split()[1] for name in names if "=" in name}
    assert attributes <= {"class", "display", "mathvariant", "width", "displaystyle"}
    assert not [name for name in names if "url(" in name or "position" in name or "chosen" in name]
    assert "<script>alert(1)</script>" in viewer.inside(".rendered mtext, .rendered pre")
    assert viewer.one("#detail").text.count("https://example.com") >= 3
    tree = ["div", {"onclick": "x"}, ["script", {}, "hacked=1"], ["img", {"src": "https://x.org/"}]]
    made = viewer.run("return built(arguments[0]).outerHTML", tree)
    assert made == "<div><img></div>"


def test_a_line_of_a_megabyte_is_shown_without_a_stop(viewer: Viewer, tmp_path: Path) -> None:
    long = "x" + "\U0001f600x" * 350_000
    sequences = [{"score": 0.0, "messages": m} for m in conversation("Go on", long, long + "y")]
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g")
    viewer.until(lambda: len(viewer.all(".card")) == 2)

    def shown() -> str:
        return str(viewer.run("return document.querySelector('.card pre').textContent"))

    assert long.startswith(shown())
    assert 10_000 < len(shown()) < 20_001
    viewer.all(".card .more")[0].click()
    assert shown() == long
    halves = r"[...document.querySelectorAll('.block')].some(b => /^[\udc00-\udfff]/.test(b.textContent))"
    assert viewer.run(f"return {halves}") is False
    viewer.run("go({view: 'diff'})")
    viewer.until(lambda: viewer.inside("ins") == "xy")


def test_many_tokens_are_shown_in_pieces(viewer: Viewer, tmp_path: Path) -> None:
    sequence = {"score": 0.0, "tokens": [4, 5] * 50_000, "trained": [0, 1] * 50_000}
    viewer.open(written(tmp_path, {"id": "g", "sequences": [sequence]}), "group=g&view=tokens")
    viewer.until(lambda: len(viewer.all(".token")) == 4000)
    assert viewer.texts(".legend li") == ["trained 50,000", "not trained 50,000"]
    assert viewer.all(".token.number")[1].text == "5"  # no tokenizer: ids
    viewer.run("arguments[0].click()", viewer.button("Show more of 100,000 tokens"))
    assert len(viewer.all(".token")) == 8000


def test_two_runs_are_overlaid_with_the_settings_that_differ(
    viewer: Viewer, tmp_path: Path
) -> None:
    both = [Curve(run, "reward_mean", [1, 2], [0.0, run + 1.0], []) for run in (0, 1)]
    compared = Compared(["old", "new"], [("trainer.lr", "1e-05", None)], num_settings=40)
    chart = Chart("reward", is_log=False, curves=both)
    viewer.open(written(tmp_path, group(1, step=2), charts=[chart], compared=compared))
    viewer.until(lambda: viewer.all(".charts svg"))
    assert viewer.texts(".curves span") == ["reward_mean, old", "reward_mean, new"]
    assert len(viewer.all("path.run-1")) == 2
    assert "Solid: old, dashed: new." in viewer.one("#detail").text
    assert viewer.one("#detail summary").text == "Settings that differ: 1 of 40"
    assert viewer.texts(".settings tr") == ["Setting old new", "trainer.lr 1e-05 not set"]
    assert viewer.all(".settings a") == []
    viewer.run("document.querySelector('.charts svg').focus()")
    viewer.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    viewer.until(lambda: viewer.texts(".curves strong") == ["1", "2"])


def test_rewards_are_shown_by_part_and_by_turn(viewer: Viewer, tmp_path: Path) -> None:
    shown = group(1)
    why = "The answer has no unit."
    shown["sequences"][0] |= {
        "messages": [
            {"role": role, "content": f"{role} {i}"}
            for i in range(2)
            for role in ("user", "assistant")
        ],
        "turn_rewards": [-0.5, 1.0],
        "notes": {"format": 0.25, "is_right": False, "read": "4"},
    }
    shown["sequences"][1] |= {"notes": {"format": 1.0, "is_right": True, "explanation": why}}
    viewer.open(written(tmp_path, shown, group(2)))
    viewer.one("#rows a[data-row='0']").click()  # the first click from the overview
    viewer.until(lambda: viewer.all(".card"))
    viewer.button("Rewards").click()
    viewer.until(lambda: viewer.all("#detail table"))
    assert viewer.texts("thead th") == ["", "Score", "Advantage", "format", "is_right"]
    assert viewer.texts("tbody tr") == ["#1 0 -0.5 0.25 0", "#2 1 0.5 1 1"]
    assert viewer.texts(".turns li") == ["-0.5 assistant 0", "+1 assistant 1"]
    cards = viewer.texts("#detail .card")
    assert "read\n4" in cards[0]
    assert f"explanation\n{why}" in cards[1]
    viewer.press("j")
    viewer.until(lambda: "Item 2" in viewer.texts("h2"))
    assert "Rewards" not in viewer.texts("#detail .tabs button")


def test_tools_and_reasoning_are_folded_and_images_shown(viewer: Viewer, tmp_path: Path) -> None:
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    picture = {"type": "image_url", "image_url": {"url": PNG}}
    elsewhere = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add"}, picture, elsewhere]},
        {"role": "assistant", "content": "", "reasoning_content": "Use it.", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "<think>\nIt said 3.</think>\n\nThree."},
    ]
    shown = {"id": "g", "images": [PNG], "sequences": [{"score": 1.0, "messages": messages}]}
    viewer.open(written(tmp_path, shown), "group=g")
    viewer.until(lambda: viewer.all(".card"))
    assert viewer.texts(".card summary") == [
        "Reasoning, 7 characters",
        "Calls add",
        "Reasoning, 10 characters",
    ]
    assert viewer.texts(".card .role")[1] == "result \u00b7 add"
    assert viewer.texts(".card pre") == ['{\n  "a": 1,\n  "b": 2\n}', "3", "Three."]
    for summary in viewer.all(".card .reasoning summary"):
        summary.click()
    opened = ["Use it.", '{\n  "a": 1,\n  "b": 2\n}', "3", "It said 3.", "Three."]
    viewer.until(lambda: viewer.texts(".card pre") == opened)
    assert [image.get_attribute("src") for image in viewer.all("#detail img")] == [PNG]
    assert "https://example.com/x.png" in viewer.one("#detail").text


def test_a_prompt_ends_at_the_first_turn_of_the_model_and_turns_have_rewards(
    viewer: Viewer, tmp_path: Path
) -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    shared = [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    sequences = [
        {"score": 0.0, "turn_rewards": rewards, "messages": [*shared, last]}
        for rewards, last in zip(
            ([0.25, -0.5], [0.75]),
            ({"role": "assistant", "content": end} for end in ("three", "four")),
            strict=True,
        )
    ]
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g")
    viewer.until(lambda: len(viewer.all(".card")) == 2)
    assert viewer.texts("#detail > section:first-of-type .role") == ["user"]
    assert viewer.texts(".card .role") == [
        *("assistant reward +0.25", "result", "assistant reward -0.5"),
        *("assistant", "result", "assistant reward +0.75"),  # rewards of the last turns
    ]


def test_the_sequences_of_a_rollout_are_one_card(viewer: Viewer, tmp_path: Path) -> None:
    [first, other] = conversation("Go", "one", "other")
    second = [*first, {"role": "user", "content": "on"}, {"role": "assistant", "content": "two"}]
    sequences = [
        {"score": 1.0, "rollout": 0, "label": "rollout 1, part 1 of 2", "messages": first},
        {"score": 0.0, "rollout": 1, "label": "rollout 2", "messages": other},
        {"score": 1.0, "rollout": 0, "label": "rollout 1, part 2 of 2", "messages": second},
    ]
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g")
    viewer.until(lambda: len(viewer.all(".card")) == 2)
    assert viewer.texts(".card.rollout > header h4") == ["Rollout 1, 2 sequences"]
    assert viewer.texts(".card.rollout .part h4") == [
        *("#1 rollout 1, part 1 of 2", "#3 rollout 1, part 2 of 2"),
    ]
    assert viewer.texts(".card.rollout pre") == ["one", "on", "two"]
    viewer.one(".card.rollout summary").click()
    viewer.until(lambda: viewer.texts(".card.rollout pre") == ["one", "one", "on", "two"])


def test_texts_are_rendered_and_one_switch_shows_them_raw(viewer: Viewer, tmp_path: Path) -> None:
    call = '**So:** <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> $x^2$ is it.'
    [messages] = conversation("Is `2` **4**?", call)
    messages[0]["content"] = [{"text": "First "}, {"image_url": {"url": PNG}}, {"text": "*then*"}]
    viewer.open(written(tmp_path, group(1, sequences=[{"score": 1, "messages": messages}])))
    viewer.one("#rows a").click()
    viewer.until(lambda: viewer.texts(".card .rendered strong") == ["So:"])
    assert viewer.all(".card .rendered math msup")
    assert viewer.texts(".card summary") == ["Calls add"]
    order = "return [...document.querySelector('.message.user').children].map(e => e.localName)"
    assert viewer.run(order) == ["div", "pre", "button", "div"]
    viewer.press("r")
    viewer.until(lambda: viewer.texts(".card pre") == [call])
    assert "raw=1" in viewer.state()
    viewer.button("Rendered").click()
    viewer.until(lambda: viewer.all(".card .rendered"))


def test_plain_texts_share_their_prompt_up_to_a_whole_word(viewer: Viewer, tmp_path: Path) -> None:
    sequences = [{"score": 0.0, "text": f"Count to ten: {rest}"} for rest in ("one", "once")]
    viewer.open(written(tmp_path, {"id": "g", "sequences": sequences}), "group=g")
    viewer.until(lambda: viewer.texts(".card pre") == ["one", "once"])
    assert viewer.texts("#detail .message pre")[0] == "Count to ten: "


def graded(folder: Path, right: list[bool]) -> Path:
    """Write an evaluation of one answer to each item."""
    samples = [
        {"item_index": i, "item_hash": f"h{i}", "num_samples": 1, "sample_index": 0, "correct": one}
        | {"messages": conversation(f"What is {i} + 1?", str(i + one))[0], "gold_answer": i + 1}
        | {"extracted_answer": str(i + one), "num_tokens": 10 + i, "explanation": EVIL}
        for i, one in enumerate(right)
    ]
    write_rows(folder / "samples.jsonl", *samples)
    return folder


def test_an_evaluation_shows_its_accuracy_and_its_wrong_answers(
    viewer: Viewer, tmp_path: Path
) -> None:
    right = [i % 30 > 0 for i in range(300)]
    viewer.open(generate_html(graded(tmp_path, right) / "samples.jsonl"))
    viewer.until(lambda: viewer.texts(".result strong") == ["96.7 %"])
    assert "95 % interval 94 % to 98.2 % \u00b7 300 answers" in viewer.one(".result").text
    assert viewer.texts(".tabs button") == ["all 300", "wrong only 10", "right 290"]
    assert len(viewer.all(".answers tbody tr")) == 200
    viewer.run("arguments[0].click()", viewer.button("Show more of 300 answers"))
    assert len(viewer.all(".answers tbody tr")) == 300
    viewer.button("wrong only 10").click()
    viewer.until(lambda: viewer.one("#count").text == "10 of 300 groups")
    took = viewer.run("const t = performance.now(); showRun(); return performance.now() - t")
    assert took < 500
    first = viewer.all(".answers tbody tr")[1]
    cells = ["30", "wrong", "What is 30 + 1?", "31", "30", "40", EVIL]
    assert [cell.text for cell in first.find_elements(By.CSS_SELECTOR, "th, td")] == cells
    viewer.all(".answers a")[1].click()
    viewer.until(lambda: "Item 30" in viewer.texts("h2"))
    viewer.press("j")
    viewer.until(lambda: "Item 60" in viewer.texts("h2"))


def test_a_comparison_shows_what_changed_in_both_directions(viewer: Viewer, tmp_path: Path) -> None:
    before = graded(tmp_path / "before", [i >= 12 for i in range(60)])
    after = graded(tmp_path / "after", [i != 40 for i in range(60)])
    assert main(["compare", str(before), str(after), "--html", str(tmp_path / "p.html")]) == 0
    viewer.open(tmp_path / "p.html")
    viewer.until(lambda: viewer.texts(".result strong") == ["+18.3 points"])
    assert "from 80 % to 98.3 %" in viewer.one(".result").text
    assert "60 paired items" in viewer.one(".result").text
    kinds = ["all 60", "wrong to right 12", "unchanged 47", "right to wrong 1"]
    assert viewer.texts(".tabs button") == kinds
    viewer.button("right to wrong 1").click()
    viewer.until(lambda: viewer.texts(".answers .of-read") == ["41 \u2192 40"])


def test_the_overview_has_charts_and_leads_to_filters(viewer: Viewer, page: Path) -> None:
    groups = [
        group(i, environment="ab"[i % 2], fate="untrained" if i == 3 else "trained")
        for i in range(6)
    ]
    groups[0]["sequences"].append({"score": 1.0, "text": "right"})
    viewer.open(written(page.parent, *groups, charts=[curves("Mean reward", [0.0, 1.0])]))
    viewer.until(viewer.rows)
    assert viewer.texts("figcaption")[0] == "Mean reward"
    assert viewer.texts("tbody tr")[:4] == [
        "a 3 0.571 20.1",
        "b 3 0.500 22",
        "trained 5 83.3 % 0.545",
        "untrained 1 16.7 % 0.500",
    ]
    assert "mean score 0.538" in viewer.one("#about").text
    assert "mean score\n0.538" in viewer.one("#detail .facts").text
    assert "trained\n5" in viewer.one("#detail .facts").text
    viewer.all("tbody a")[3].click()
    viewer.wait_for_rows("What is 3 + 1?")


def test_a_single_value_is_drawn_as_a_dot(viewer: Viewer, tmp_path: Path) -> None:
    viewer.open(written(tmp_path, group(1, step=1), charts=[curves("gap", [2e-6])]))
    [*_, dot] = viewer.until(lambda: viewer.all(".charts path.alone"))
    assert viewer.run("return arguments[0].getTotalLength() === 0", dot)


def test_charts_share_a_cursor_and_a_zoom_and_open_the_groups_of_a_step(
    viewer: Viewer, tmp_path: Path
) -> None:
    groups = [group(i, step=i, loss_share=0.25) for i in range(1, 101)]
    groups += [group(101, step=40, loss_share=0.5), group(102, step=40, loss_share=0.1)]
    reward = curves("reward", [i / 10 for i in range(100)], [5.0] * 50)
    loss = curves("loss", [9.0 if i == 39 else 1.0 + i % 2 for i in range(100)], outliers=[39])
    viewer.open(written(tmp_path, *groups, charts=[reward, loss]))
    viewer.until(lambda: len(viewer.all(".charts svg")) == 2)
    assert len(viewer.all(".outlier")) == 1
    drawing = viewer.all(".charts svg")[1]
    width = drawing.rect["width"]

    def at(step: int, first: int = 1, last: int = 100) -> int:
        """Return the distance of a step from the middle of the chart, where the driver points."""
        share = (46 + 304 * (step - first) / (last - first)) / 360
        return round(width * share - width / 2)

    pointer = ActionChains(viewer.driver).move_to_element_with_offset
    pointer(drawing, at(40), 0).perform()
    viewer.until(lambda: viewer.texts("figcaption span") == ["step 40", "step 40"])
    assert viewer.texts(".curves strong") == ["3.9", "5", "9"]
    pointer(drawing, at(30), 0).click_and_hold().move_by_offset(
        at(50) - at(30), 0
    ).release().perform()
    viewer.until(lambda: viewer.state() in ("#zoom=30-50", "#zoom=31-50", "#zoom=30-49"))
    viewer.run("go({zoom: '30-50'})")
    drawing = viewer.until(lambda: viewer.all(".charts svg")[1])
    pointer(drawing, at(40, 30, 50), 0).perform()
    viewer.until(lambda: viewer.texts("figcaption span") == ["step 40", "step 40"])
    viewer.press(Keys.NULL)
    ActionChains(viewer.driver).click().perform()
    viewer.until(lambda: "Step 40" in viewer.texts("h2"))
    shown = ["What is 101 + 1?", "What is 40 + 1?", "What is 102 + 1?"]
    assert viewer.texts("tbody th") == shown
    assert viewer.texts("tbody td:nth-child(2)") == ["50 %", "25 %", "10 %"]
    assert "9 (outlier)" in viewer.one("#detail .facts").text
    assert viewer.one("#count").text == "3 of 102 groups"
    viewer.all("tbody a")[0].click()  # the second click from the overview
    viewer.until(lambda: "Item 101" in viewer.texts("h2"))
    viewer.driver.back()
    viewer.until(lambda: "Step 40" in viewer.texts("h2"))
    viewer.button("Back").click()
    viewer.button("Show all steps").click()
    viewer.until(lambda: viewer.one("#count").text == "102 groups")
    viewer.run("document.querySelector('.charts svg').focus()")
    viewer.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    viewer.until(lambda: "Step 2" in viewer.texts("h2"))


def test_a_finger_points_at_a_step_first_and_then_opens_it(viewer: Viewer, page: Path) -> None:
    screen = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    viewer.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    reward = curves("reward", [i / 100 for i in range(100)])
    viewer.open(
        written(page.parent, *(group(i, step=i) for i in range(100)), charts=[reward]), "view=run"
    )
    box = viewer.one(".charts svg").rect

    def tap(x: float) -> None:
        at = [{"x": box["x"] + x, "y": box["y"] + 50}]
        for kind, points in (("touchStart", at), ("touchEnd", [])):
            touched = {"type": kind, "touchPoints": points}
            viewer.driver.execute_cdp_cmd("Input.dispatchTouchEvent", touched)

    tap(box["width"] / 2)
    viewer.until(lambda: "step 45" in viewer.texts("figcaption")[0])
    assert viewer.state() == "#view=run"
    tap(box["width"] / 4)
    viewer.until(lambda: "step 15" in viewer.texts("figcaption")[0])
    tap(box["width"] / 4 + 5)
    viewer.until(lambda: "Step 15" in viewer.texts("h2"))


STATES = (
    *("", "view=run", "view=step&at=0", "view=lengths", "where=score+%3C%3C+1"),
    *("view=items", "view=items&first=g1&second=g2"),
    *("group=g1", "group=g1&view=tokens", "group=g1&view=diff", "group=g1&view=rewards"),
)


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(viewer: Viewer, tmp_path: Path, width: int) -> None:
    shown = group_with_tokens(1)
    shown["sequences"][1]["messages"][-1]["content"] = "x" * 3000
    shown["sequences"][1] |= {
        "turn_rewards": [1.0],
        "notes": {"x" * 50 + str(i): 1 for i in range(9)},
    }
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 900}
    viewer.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    page = written(
        tmp_path, shown, group(2), decode=decode, charts=[curves("reward", [0.5, 1.0], [1.0])]
    )
    for state in STATES:
        viewer.open(page, state)
        viewer.until(lambda: viewer.all("#detail *"))
        assert viewer.run("return document.scrollingElement.scrollWidth") == width, state
        is_list = not state.startswith(("view", "group"))
        assert viewer.one("#list").is_displayed() == (width == 1280 or is_list), state
        assert viewer.one("#detail").is_displayed() == (width == 1280 or not is_list), state


def test_the_page_is_dark_where_the_system_is(viewer: Viewer, page: Path) -> None:
    for scheme, is_dark in (("dark", True), ("light", False)):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        viewer.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        viewer.open(page)
        colours = viewer.run(
            "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
        )
        text, background = (sum(map(int, colour[4:-1].split(", "))) for colour in colours)
        assert (text > background + 300) == is_dark


def test_a_file_that_was_cut_off_says_so(viewer: Viewer, tmp_path: Path) -> None:
    path = written(tmp_path, *(group(i) for i in range(60)))
    whole = path.read_text()
    path.write_text(whole[: whole.index('id="chunk-1"') - 40])
    viewer.open(path, "group=g55")
    viewer.until(lambda: "chunk-1 is missing" in viewer.one("#detail").text)


@contextmanager
def serving(handle: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Serve GET requests from a thread."""

    class Handler(http.server.BaseHTTPRequestHandler):
        do_GET = functools.partialmethod(lambda self: handle(self))

        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(request: http.server.BaseHTTPRequestHandler, content: bytes, kind: str) -> None:
    request.send_response(200)
    request.send_header("Content-Type", kind)
    request.end_headers()
    request.wfile.write(content)


def test_the_rows_of_many_groups_are_there_before_the_chunks(
    viewer: Viewer, tmp_path: Path
) -> None:
    sequence = {"score": 1.0, "text": "a text"}
    groups = ({"id": f"g{i}", "item_id": i, "sequences": [sequence]} for i in range(30_000))
    write_page(tmp_path / "p.html", groups, title="t", about="")
    page = (tmp_path / "p.html").read_bytes()
    cut = page.index(b'<script type="text/plain" id="chunk-1"')
    is_seen = threading.Event()

    def slowly(request: http.server.BaseHTTPRequestHandler) -> None:
        answer(request, page[:cut], "text/html")
        is_seen.wait(60)
        request.wfile.write(page[cut:])

    with serving(slowly) as url:
        viewer.open(url)
        viewer.until(viewer.rows)
        assert viewer.run("return document.readyState") == "loading"
        assert viewer.one("#count").text == "30,000 groups"
        assert len(viewer.rows()) < 50
        print(
            "first paint:", viewer.run("return performance.getEntriesByType('paint')[0].startTime")
        )
        viewer.run("go({group: 'g29999'})")
        is_seen.set()
        viewer.until(lambda: "Item 29999" in viewer.texts("h2"))
        assert viewer.run("return unpacked.size") == 1
    viewer.run("document.getElementById('scroller').scrollTop = 1e9")
    viewer.until(lambda: viewer.run("return [...rowElements.keys()].at(-1)") == 29_999)
    assert len(viewer.rows()) < 50
    drawing = """const began = performance.now(); go({group: undefined, view: 'lengths'});
        document.querySelector('.points').getBBox(); return performance.now() - began"""
    assert viewer.run(drawing) < 2000


def hub_after(num_groups: int) -> dict[str, Any]:
    """Return what a live page says of the hub, and its readings."""
    environment = {"name": "sums", "state": "active", "last_seen_s": 3.1, "queued_sequences": 5}
    hub = {
        **{"batch": "none", "blocker": "too_few", "reason": "too few groups", "refusal": None},
        **{"current_step": 4, "policy_version": 4, "queued_groups": 3, "leased_batches": 0},
        **{"num_active": 1, "num_environments": 1, "dead": {"size": 2}},
        "environments": [{**environment, "items_in_flight": 2, "oldest_item_s": 240}],
    }
    points = [{"time": 60.0 * i, "queued": i, "step": 4, "score": None} for i in range(4)]
    return {"hub": hub, "points": points}


def test_a_served_page_asks_for_the_form_of_the_texts_it_shows(
    viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "PAGE_CHARS", 0)  # no text has its form in the file
    long = "**a** " + "x " * 30_000
    [messages] = conversation("Is **it** $x$?", long)
    write_rows(tmp_path / "g.jsonl", *[{"scores": [1.0], "messages": [messages]}] * 2)
    page = StoredPage([tmp_path / "g.jsonl"], tmp_path / "p.html", None)
    with serving_app(stored_app(page)) as url:
        viewer.open(url, "group=line-2")
        viewer.until(lambda: viewer.texts(".rendered strong") == ["it"])
        assert viewer.all(".rendered math")
        assert viewer.all(".card pre")  # the long text is shown as it is
        viewer.button("Raw").click()
        viewer.until(lambda: not viewer.all(".rendered"))


def test_a_served_run_reads_its_groups_when_they_are_shown(viewer: Viewer, tmp_path: Path) -> None:
    rows = [{"scores": [1.0], "messages": [f"text {i}"], "group_id": f"g{i}"} for i in range(120)]
    write_rows(tmp_path / "run" / "g.jsonl", *rows)
    page = StoredPage([tmp_path / "run"], tmp_path / "page.html", None)
    with serving_app(stored_app(page)) as url:
        viewer.open(f"{url}/")
        viewer.until(viewer.rows)
        assert viewer.run("return unpacked.size") == 0
        viewer.run("go({group: 'g119'})")
        viewer.until(lambda: viewer.texts(".card pre") == ["text 119"])
        assert viewer.run("return [...unpacked.keys()]") == [2]
        viewer.one("[name=q]").send_keys("text 77")
        viewer.wait_for_rows("text 77")


def test_a_live_page_shows_new_groups_and_keeps_the_open_one(viewer: Viewer) -> None:
    groups = [group(0)]
    is_broken = threading.Event()

    def handle(request: http.server.BaseHTTPRequestHandler) -> None:
        path, _, after = request.path.partition("?after=g")
        if path == "/groups":
            new = groups[int(after) + 1 :] if after else groups
            index = Index()
            for each in groups[-200:]:
                index.add(row_of(each))
            head = {"about": f"{len(groups)} so far", **hub_after(len(groups))}
            columns = index.content() if new else None
            found = json.dumps({"head": head, "index": columns, "groups": new, "vocabulary": {}})
            answer(request, b"?" if is_broken.is_set() else found.encode(), "application/json")
        else:
            live = {"poll": "groups", "every_s": 0.05}
            content = served_page({"title": "Live", "about": "", "live": live}, Index())
            answer(request, content, "text/html")

    with serving(handle) as url:
        viewer.open(url)
        viewer.wait_for_rows("What is 0 + 1?")
        state = """return ['.blocked', 'tbody tr', 'figcaption', '.curves'].map(
            kind => [...document.querySelectorAll(`#hub ${kind}`)].map(e => e.innerText.trim()))"""
        assert viewer.run(state) == [
            ["No batch: too few groups"],
            ["sums\tactive\t3 s\t5\t2\t4 min"],
            ["queued groups\n3 min"],  # the others do not change
            ["3"],
        ]
        viewer.one("#rows a").click()
        viewer.until(lambda: viewer.all(".card"))
        groups += [group(1), group(2, environment="words")]
        viewer.wait_for_rows(*(f"What is {i} + 1?" for i in (2, 1, 0)))
        assert viewer.one("#about").text == "3 so far"
        groups += [group(i) for i in range(3, 202)]
        viewer.until(lambda: viewer.one("#count").text == "200 groups")
        assert viewer.run("return rowOfId.has('g0')") is False
        assert "Item 0" in viewer.texts("h2")
        is_broken.set()
        viewer.until(lambda: viewer.one("#live").text.startswith("No answer"))
        is_broken.clear()
        viewer.until(lambda: viewer.one("#live").text == "Live")
        viewer.one("[name=q]").send_keys("it is 3.")
        viewer.one("#more-filters summary").click()
        Select(viewer.one("[name=env]")).select_by_value("words")
        viewer.wait_for_rows("What is 2 + 1?")
        groups.append(group(202, environment="words", gold_answer="It is 3."))
        viewer.wait_for_rows("What is 202 + 1?")
        viewer.open("about:blank")
