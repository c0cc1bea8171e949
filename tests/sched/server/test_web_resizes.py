"""How the page draws a job whose replicas come and go while the others train."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import expect

from pipollux_sched.lifecycle import Allocate, ElasticReady, Switched, WaitingToJoin
from tests.cli.kept import point
from tests.sched.server.browser import Visit
from tests.sched.supervised import ADMIN, Service
from tests.waiting import until


@pytest.mark.exhaustive
def test_no_slot_is_drawn_for_two(tab: Visit) -> None:
    """One job takes the lowest of three slots, another two; who comes later waits for its own."""
    page = tab.open(ADMIN)
    found = page.evaluate("""async () => {
      const { layOut } = await import("/web/gantt.js");
      const attempts = [["late", 3, null, "a", 1], ["first", 0, 4, "a", 1],
        ["wide", 1, null, "a", 2],
        ["gone", 1, 2, "lost", 1]].map(([job, created_at, ended_at, node, num_stages]) =>
          ({ job, attempt: 1, created_at, ended_at, nodes: [node], num_stages }));
      return layOut(attempts, { a: { slots: 3 } })
        .map((block) => [block.attempt.job, block.slot, block.slots, block.begin]);
    }""")
    assert found == [["first", 0, 1, 0], ["wide", 1, 2, 1], ["late", 0, 1, 4]]
    tab.check()


@pytest.mark.exhaustive
def test_who_stays_is_drawn_where_it_was(tab: Visit) -> None:
    """At an elastic resize that leaves a lower slot free, too."""
    page = tab.open(ADMIN)
    found = page.evaluate("""async () => {
      const { layOut } = await import("/web/gantt.js");
      const attempts = [["other", 1, 0, 3, ["a"]], ["elastic", 1, 1, 5, ["a"]],
        ["elastic", 2, 5, null, ["a", "b"]]].map(([job, membership, created_at, ended_at, nodes]) =>
          ({ job, attempt: 1, membership, created_at, ended_at, nodes, num_stages: 1 }));
      const blocks = layOut(attempts, { a: { slots: 2 }, b: { slots: 1 } });
      return [blocks.map((one) => [one.attempt.job, one.node, one.slot, one.begin]),
        new Set(blocks.map((one) => one.key)).size];
    }""")
    assert found == [
        [
            ["other", "a", 0, 0],
            ["elastic", "a", 1, 1],
            ["elastic", "a", 1, 5],
            ["elastic", "b", 0, 5],
        ],
        4,
    ]
    tab.check()


@pytest.mark.exhaustive
def test_a_resize_is_shown_as_that(tab: Visit, service: Service) -> None:
    """No bar ends where nobody stopped, no curve breaks off, and no restart is counted."""
    store, now = service.store, time.time()
    service.submit("elastic", ["node-a"], max_replicas=4)
    store.add_report("elastic", 1, [point(step, now - 20 + step) for step in range(1, 11)])
    for event in (ElasticReady(1), Allocate(["node-a", "node-b"], "grows from 1 to 2 replicas")):
        store.transition("elastic", event)
    page = tab.open(ADMIN, "/jobs/elastic")
    expect(page.locator(".summary").first).to_have_text(
        "grows from 1 to 2 replicas · Changing from 1 to 2 replicas; replica 1 on node-b is on its "
        "way."
    )
    why = page.locator(".why-it")
    expect(why).to_contain_text(
        "Changing: from 1 to 2 replicas; replica 1 on node-b is on its way."
    )
    expect(why).to_contain_text("A change would be an elastic resize")
    for event in (WaitingToJoin(1, (1,)), Switched(1, 2, step=10, seconds=0.25)):
        store.transition("elastic", event)
    again = time.time()
    points = [point(step, again + 0.01 * step, replicas=2) for step in range(11, 21)]
    store.add_report("elastic", 1, points)
    expect(page.locator(".tiles")).to_contain_text("0 and 1 elastic resize")
    loss = page.get_by_role("img", name=re.compile("^Loss: from"))
    expect(loss.locator(".change line")).to_have_count(1)
    expect(loss.locator(".restart line")).to_have_count(0)
    expect(loss.locator(".mean path")).to_have_count(1)
    shown = page.locator("section", has_text="Attempts").last.locator("tbody tr")
    expect(shown.first.locator("th")).to_have_text("1, membership 2")
    expect(shown.first).to_contain_text("250 ms")
    expect(page.locator(".why-it")).to_contain_text("An elastic resize: the others train while")
    page.goto(f"{tab.url}/#/")
    expect(page.locator(".gantt .train > rect").nth(1)).to_be_visible()

    def told() -> bool:
        """Ask for the last bar, again where the page has been drawn anew meanwhile."""
        page.locator(".gantt").first.focus()
        page.keyboard.press("End")
        words = page.locator(".scroll .hover").first.inner_text()
        return "elastic · attempt 1, membership 2" in words and "250 ms" in words

    until(told, "the bar is told")
    tab.check()
