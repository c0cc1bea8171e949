"""The pictures of a report and of simulations in a real browser: what is drawn, read and zoomed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from pipollux_sched.report.page import render_report
from tests.extent import first
from tests.sched.report import synthetic_log as synthetic
from tests.sched.server.browser import Visit, chromium, find_chromium, visit
from tests.services import service_missing

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"'&"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        service_missing("there is no Chromium on this machine")
    with chromium(path) as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("report"), synthetic.synthetic_log())


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "report.html"
    path.write_text(render_report(events), encoding="utf-8")
    return path


def shown(tab: Visit, path: Path) -> Page:
    tab.page.goto(path.as_uri())
    assert tab.page.locator("[data-chart]:empty").count() == 0
    assert tab.errors == []
    assert tab.requests == [path.as_uri()], "it needs nothing but itself"
    return tab.page


@pytest.fixture
def tab(browser: Browser) -> Iterator[Visit]:
    with visit(browser, "") as tab:
        yield tab


def check_pointing_and_keys(page: Page) -> None:
    gantt = page.locator("[data-chart=gantt]")
    box = gantt.locator(".hover")
    gantt.locator(".block > rect").first.hover()
    expect(box).to_contain_text("char-lm, attempt 1 on node-0")
    gantt.get_by_role("img").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(box).to_contain_text("digits, attempt 1 on node-1")
    expect(gantt.locator(".chosen")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    curve = page.locator("[data-chart=goodput-0]")
    curve.get_by_role("img").focus()
    page.keyboard.press("End")
    expect(curve.locator(".hover")).to_contain_text("attempt 2")
    assert curve.locator(".hover-row span").all_inner_texts() == [
        *("goodput", "batch size", "efficiency", "replicas")
    ]
    expect(curve.locator(".cursor circle")).to_have_count(4)


def test_pictures_are_drawn_and_read_with_pointer_and_keys(tab: Visit, report: Path) -> None:
    page = shown(tab, report)
    gantt, bubble = page.locator("[data-chart=gantt]"), page.locator("[data-chart=bubble-0]")
    expect(gantt.locator(".free > rect")).to_have_count(4)
    expect(gantt.locator(".block > rect")).to_have_count(6)
    expect(gantt.locator(".train > rect")).to_have_count(6)
    words = gantt.locator("text").all_text_contents()
    assert {"char-lm submitted", "digits complete", "char-lm  R = 2", "node-0"} <= set(words)
    heights = gantt.locator(".block > rect").evaluate_all(
        "all => all.map(r => r.height.baseVal.value)"
    )
    assert max(heights) > 1.9 * min(heights), "a replica of two stages is as high as two slots"
    for kind in ("forward", "backward"):
        expect(bubble.locator(f".{kind} > rect")).to_have_count(2 * 2 * 4)
    assert bubble.locator("text").all_text_contents().count("3") == 2 * 2 * 2
    # What is reported and its smoothed course, for each of two attempts.
    loss = page.locator("[data-chart=loss-0-by-step]")
    for kind in ("raw", "mean"):
        expect(loss.locator(f".{kind} path")).to_have_count(2)
    expect(page.locator("[data-chart=prediction] .mark > circle")).to_have_count(5)
    missing = page.evaluate("""[...document.querySelectorAll("[fill^='url(#']")]
      .filter((one) => !document.getElementById(one.getAttribute("fill").slice(5, -1))).length""")
    assert missing == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    check_pointing_and_keys(page)


@pytest.mark.parametrize("width", first(1, [400, 1400]))
@pytest.mark.exhaustive
def test_nothing_is_wider_than_the_window(browser: Browser, report: Path, width: int) -> None:
    size = {"width": width, "height": 900}
    with visit(browser, "", viewport=size, color_scheme="dark") as tab:
        page = shown(tab, report)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wide = page.locator(".drawing").evaluate_all("all => all.map((one) => one.clientWidth)")
        assert max(wide) <= width
        free = page.locator(".free").first.evaluate("one => getComputedStyle(one).fill")
        assert free == "rgb(35, 37, 41)", "the dark scheme's"


@pytest.mark.exhaustive
def test_nothing_is_cut_or_hidden_in_a_narrow_window(browser: Browser, tmp_path: Path) -> None:
    """Names of nodes and jobs are whole, and each cell of the tables is within the window."""
    node, job = "gpu-node-0.rack-12.example.org", "a-language-model-with-a-long-name"
    log = json.dumps(synthetic.synthetic_log()).replace('"node-0"', f'"{node}"')
    events = json.loads(log.replace("char-lm", job))
    with visit(browser, "", viewport={"width": 400, "height": 900}) as tab:
        page = shown(tab, written(tmp_path, events))
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        expect(page.locator("[data-chart=gantt] .node text").first).to_have_text(node)
        outside = """all => all.map((one) => [one.textContent, one.getBoundingClientRect()])
          .filter(([, box]) => !box.width || box.left < 0 || box.right > 400)
          .map(([text]) => text)"""
        cells = page.locator("tbody th, tbody td")
        assert cells.count() > 50
        assert cells.evaluate_all(outside) == []
        name = page.locator("#jobs tbody th").first
        assert name.inner_text().strip() == job
        assert name.evaluate("one => one.scrollWidth <= one.clientWidth")
        state = page.locator("#jobs tbody td[data-title]").first
        content = "one => getComputedStyle(one, '::before').content"
        assert state.evaluate(content) == '"Stages "'


@pytest.mark.exhaustive
def test_a_part_is_shown_alone_and_all_again(tab: Visit, report: Path) -> None:
    page = shown(tab, report)
    gantt = page.locator("[data-chart=gantt]")
    blocks = gantt.locator(".block > rect")
    gantt.scroll_into_view_if_needed()
    place = gantt.locator(".free > rect").first.bounding_box()
    assert place is not None
    page.mouse.move(place["x"] + 5, place["y"] + 5)
    page.mouse.down()
    page.mouse.move(place["x"] + place["width"] / 5, place["y"] + 5, steps=3)
    expect(gantt.locator(".range")).to_be_visible()
    page.mouse.up()
    expect(blocks).to_have_count(1)
    gantt.get_by_role("button", name="show all").click()
    expect(blocks).to_have_count(6)
    gantt.get_by_role("img").focus()
    for _ in range(4):
        page.keyboard.press("+")
    expect(gantt.get_by_role("button", name="show all")).to_be_visible()
    page.keyboard.press("Escape")
    expect(blocks).to_have_count(6)


@pytest.mark.exhaustive
def test_hostile_names_are_text(tab: Visit, tmp_path: Path) -> None:
    log = [
        {**event, "job": HOSTILE if event["job"] == "char-lm" else event["job"]}
        for event in synthetic.synthetic_log()
    ]
    page = shown(tab, written(tmp_path, log))
    gantt = page.locator("[data-chart=gantt]")
    gantt.locator(".block > rect").first.hover()
    expect(gantt.locator(".hover")).to_contain_text(HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert (
        page.locator("img").count()
        == page.get_by_role("img").count() - page.locator("[role=img]").count()
    )


@pytest.mark.exhaustive
def test_without_scripts_all_words_and_tables_stay(browser: Browser, report: Path) -> None:
    with visit(browser, "", java_script_enabled=False) as tab:
        tab.page.goto(report.as_uri())
        assert "<noscript>" in report.read_text(), "which says why there are no pictures"
        expect(tab.page.locator("#jobs tbody tr:has(th)")).to_have_count(2)


@pytest.mark.exhaustive
def test_labels_over_the_chart_never_cross(tab: Visit, report: Path) -> None:
    """Lanes against their definition, on rows of flags placed at random."""
    rnd = random.Random(3)  # noqa: S311  # chance for a test's data, not a secret
    rows = [
        [(rnd.uniform(100, 980), rnd.uniform(40, 200)) for _ in range(rnd.randint(1, 9))]
        for _ in range(200)
    ]
    found = shown(tab, report).evaluate("rows => rows.map((row) => lanes(row, 1000))", rows)
    for places, flags in zip(rows, found, strict=True):
        boxes = [
            ((x - w, x) if flipped else (x, x + w), lane)
            for (x, w), (lane, flipped) in zip(places, flags, strict=True)
        ]
        for i, ((low, high), lane) in enumerate(boxes):
            for j, ((other_low, other_high), other_lane) in enumerate(boxes):
                if i != j and lane == other_lane:
                    assert high <= other_low or other_high <= low
                if i != j and low < places[j][0] < high:
                    assert lane > other_lane


@pytest.mark.exhaustive
def test_smoothing_keeps_lines_and_lowers_noise(tab: Visit, report: Path) -> None:
    page = shown(tab, report)
    line = [(i, 3.0 - 0.1 * i) for i in range(30)]
    zigzag = [(i, (-1.0) ** i) for i in range(40)]
    smoothed = [page.evaluate("points => smoothed(points, 9)", points) for points in (line, zigzag)]
    assert [y for _, y in smoothed[0]] == pytest.approx([y for _, y in line])
    assert max(abs(y) for _, y in smoothed[1][5:-5]) < 0.2
