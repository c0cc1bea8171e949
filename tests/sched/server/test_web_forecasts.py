"""Forecasts on the page: in the list, on a job's page, and beside what happened."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import expect

from pipollux_sched.lifecycle import Allocate, Exited, Outcome
from pipollux_sched.store import StoredForecast
from tests.sched.server.browser import Visit
from tests.sched.supervised import ADMIN, Service


@pytest.mark.exhaustive
def test_forecasts_and_how_they_turned_out(tab: Visit, service: Service) -> None:
    store, now = service.store, time.time()
    service.submit("done")
    soon = {"low": now - 5.0, "median": now + 10.0, "high": now + 3600.0}
    later = {"low": now + 7500.0, "median": now + 9000.0, "high": None}
    forecasts = {
        "done": StoredForecast(now, soon, soon, soon),
        "grown": StoredForecast(now, None, later, later, "pruning is not foreseen"),
    }
    store.forecasts.keep(forecasts, ["done"])
    store.transition("done", Allocate(["node-b"], "it is free"))
    store.transition("done", Exited(1, Outcome.COMPLETE, step=9, epoch=0))
    page = tab.open(ADMIN)
    grown = page.locator(".jobs tbody tr", has=page.get_by_role("link", name="grown", exact=True))
    expect(grown).to_contain_text("over 2 h 0")
    past = page.locator(".forecasts")
    expect(past).to_contain_text("They held 100 % of 1 end")
    expect(past.locator("tbody tr")).to_have_count(1)
    expect(past.locator("tbody tr td").nth(3)).to_have_text("yes")
    page.get_by_role("link", name="grown").first.click()
    facts = page.locator(".facts")
    expect(facts).to_contain_text("Ends")
    expect(facts).to_contain_text("to later")
    expect(facts).to_contain_text("pruning is not foreseen")
    expect(page.locator(".why-it")).to_contain_text("Forecast")
    expect(page.locator(".why-it")).to_contain_text("; pruning is not foreseen.")
    tab.check()
