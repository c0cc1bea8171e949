"""The web page in a real browser, over a real supervisor: what it shows, asks, does and refuses."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from pipollux_sched.lifecycle import Phase
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.server import create_app
from pipollux_sched.server.http_server import HttpServer
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.spec.tokens import Role
from pipollux_sched.store import NodeCondition, StateDir
from tests.extent import first
from tests.sched.crowd import crowd
from tests.sched.server.browser import HOSTILE, Visit, visit
from tests.sched.supervised import ADMIN, NODES, SCRIPT, Service
from tests.waiting import until

# Texts that are wider than their place, in which nothing says so.
CUT = """[...document.querySelectorAll("td, th, summary > *, .tiles dd, .phases a")]
  .filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.textContent)"""


def row(page: Page, name: str) -> list[str]:
    """The cells of a job's row in the table of jobs."""
    cells = page.locator(".jobs tbody tr", has=page.get_by_role("link", name=name, exact=True))
    return cells.locator("th, td").all_inner_texts()


def test_the_token_is_asked_for_refused_and_kept(tab: Visit) -> None:
    page = tab.open(None)
    page.get_by_label("Admin token").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_have_text(
        "This is not a valid token of this scheduler. The admin token is in admin.token in its "
        "state directory."
    )
    assert page.evaluate("sessionStorage.length") == 0
    assert [error for error in tab.errors if "401" not in error] == []
    tab.errors.clear()
    page.get_by_label("Admin token").fill(ADMIN)
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("link", name="grown").first).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="grown").first).to_be_visible()
    page.get_by_role("button", name="Forget token").click()
    expect(page.get_by_label("Admin token")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0
    tab.check()


@pytest.mark.exhaustive
def test_a_link_with_the_token_does_not_stay_in_the_address(tab: Visit) -> None:
    page = tab.open(ADMIN)
    expect(page.locator(".state")).to_have_text("live")
    assert page.url == f"{tab.url}/#/"
    assert not [url for url in tab.requests if ADMIN in url.partition("#")[0]]
    assert page.evaluate("history.length") <= 2  # the blank page, and this one
    page.goto(f"{tab.url}/#token={ADMIN}")  # once more, into the page that is open
    expect(page).to_have_url(f"{tab.url}/#/")
    expect(page.locator(".state")).to_have_text("live")
    tab.check()
    page.goto(f"{tab.url}/#token=wrong")
    expect(page.get_by_role("alert")).to_contain_text("not a valid token of this scheduler")
    assert page.evaluate("sessionStorage.length") == 0


def check_page_of_grown(page: Page) -> None:
    for title in ("Goodput", "Loss", "Step time", "Batch size", "Gradient noise scale", "Slots"):
        picture = page.get_by_role("img", name=re.compile(f"^{title}.*: from "))
        expect(picture.locator(".mean path").first).to_have_attribute("d", re.compile(r"^M\d"))
    expect(page.get_by_role("img", name=re.compile("^Goodput")).locator(".restart")).to_have_count(
        1
    )
    step_time = page.get_by_role("img", name=re.compile("^Step time"))
    step_time.focus()
    page.keyboard.press("End")
    shown = page.locator(".curve .hover:visible")
    expect(shown).to_contain_text("attempt 2")
    assert shown.locator(".hover-row").all_inner_texts() == [
        *("measured\n100 ms", "predicted\n110 ms")
    ]
    expect(page.locator(".why-it")).to_contain_text("It has 2 replicas of 1 stage on node-a ×2.")
    expect(page.locator(".why-it table tbody tr")).to_have_count(3)
    attempts = page.locator("section", has_text="Attempts").last.locator("tbody tr")
    assert attempts.nth(1).locator("th, td").all_inner_texts()[-2:] == ["stopped", "move"]


def test_the_overview_and_the_page_of_a_job(tab: Visit) -> None:
    page = tab.open(ADMIN)
    expect(page.locator(".jobs tbody tr")).to_have_count(2)
    assert row(page, "grown")[:8] == [
        *("grown", "Running", "2×1", "node-a ×2", "1/4", "1.25", "580", "1")
    ]
    assert row(page, "hostile")[1] == "Failed"
    titles, figures = (page.locator(f".tiles {tag}").all_inner_texts() for tag in ("dt", "dd"))
    tiles = dict(zip(titles, figures, strict=True))
    assert " ".join(tiles["Slots in use"].split()) == "2 of 4"
    assert " ".join(tiles["Goodput"].split()) == "580 samples/s"
    # Two replicas now, one before; the one that failed.
    expect(page.locator(".gantt .block > rect")).to_have_count(4)
    expect(page).to_have_title("1 running, 0 queued · Pipollux")
    page.get_by_role("link", name="Loss").click()
    expect(page.locator(".jobs [aria-sort]")).to_have_attribute("aria-sort", "ascending")
    expect(page.locator(".jobs tbody th")).to_have_text(["grown", "hostile"])
    page.get_by_role("link", name="Job", exact=True).click()
    expect(page.locator(".jobs tbody th")).to_have_text(["grown", "hostile"])
    page.get_by_role("link", name="Job", exact=True).click()
    expect(page.locator(".jobs tbody th")).to_have_text(["hostile", "grown"])
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.hacked") is None
    page.goto(f"{tab.url}/#/jobs/grown")
    check_page_of_grown(page)
    tab.check()


@pytest.mark.exhaustive
def test_the_teams(tab: Visit, service: Service) -> None:
    page = tab.open(ADMIN)
    expect(page.locator(".jobs tbody tr")).to_have_count(2)
    expect(page.locator(".teams")).to_be_hidden()
    vision = {"name": "vision", "quota": 4, "lend": 3, "max_submit_jobs": 9}
    teams = [{"name": "text", "quota": 1, "borrow": 2}, vision]
    spec = TeamsSpec.model_validate({"teams": teams, "default": "text"})
    service.control.set_teams(spec)
    for number in range(5):
        service.submit(f"v{number}", team="vision")
    service.store.teams.set_notices({"grown": time.time() + 3600})
    rows = page.locator(".teams tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(1).get_by_role("link")).to_have_text(["v0", "v1", "v2"])
    expect(rows.nth(0).locator("td").last).not_to_have_text("–")
    text, other = (rows.nth(number).locator("th, td").all_inner_texts() for number in (0, 1))
    assert text[:9] == ["text", "1", "2", "1 of 2", "0", "1", "1", "1", "–"]
    assert other == [
        *("vision", "4", "0", "0", "1 of 3", "1", "0", "5 of 9", "v0, v1, v2 and 2 more", "–")
    ]
    expect(page.locator(".teams .note").last).to_have_text(
        "The quotas are 5 slots, but there are only 4: each team gets its share."
    )
    assert page.evaluate(CUT) == []
    rows.nth(1).get_by_role("link", name="v0").click()
    expect(page).to_have_title("v0 · Pipollux")
    page.go_back()
    expect(rows).to_have_count(2)
    service.control.set_teams(None)
    expect(page.locator(".teams")).to_be_hidden()
    tab.check()


@pytest.mark.exhaustive
def test_what_is_chosen_stands_in_the_address(tab: Visit) -> None:
    page, names = tab.open(ADMIN), tab.page.locator(".jobs tbody th")
    page.get_by_role("link", name="Failed 1").click()
    expect(names).to_have_text(["hostile"])
    assert page.url == f"{tab.url}/#/?phase=Failed"
    page.get_by_role("link", name="All 2").click()
    expect(names).to_have_count(2)
    search = page.get_by_label("Search jobs by name")
    search.press_sequentially("GRO")
    expect(names).to_have_text(["grown"])
    expect(search).to_be_focused()
    assert page.url == f"{tab.url}/#/?name=GRO"
    page.get_by_role("link", name="grown", exact=True).first.click()
    expect(page).to_have_title("grown · Pipollux")
    page.go_back()
    expect(names).to_have_text(["grown"])
    expect(search).to_have_value("GRO")
    page.go_back()  # one step, whatever the number of letters
    expect(names).to_have_count(2)
    expect(search).to_have_value("")
    page.go_back()
    expect(names).to_have_text(["hostile"])
    shared = tab.page.context.new_page()
    shared.goto(f"{tab.url}/#token={ADMIN}")
    shared.goto(f"{tab.url}/#/?phase=Failed&phase=Queued&name=nothing&page=7")
    expect(shared.locator(".jobs .note").first).to_have_text("no matching jobs")
    expect(shared.locator(".phases [aria-current]")).to_have_text(["Queued 0", "Failed 1"])
    tab.check()


@pytest.mark.exhaustive
def test_a_thousand_jobs_on_64_nodes(browser: Browser, tmp_path: Path) -> None:
    """What there is on the page does not grow with them; the rest is a link or a key away."""
    phases = crowd(StateDir(tmp_path).database, time.time())
    nodes = [NodeSpec(name=f"node-{n:02}", slots=8, kind="cpu") for n in range(64)]
    with Service(tmp_path, nodes=nodes) as service, visit(browser, service.server.url) as tab:
        page = tab.open(ADMIN)
        rows = page.locator(".jobs tbody tr")
        expect(rows).to_have_count(50)
        queued = phases["Queued"]
        expect(page).to_have_title(re.compile(rf"^\d+ running, {queued} queued · Pipollux$"))
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        jobs, places = (page.locator(which).bounding_box() for which in (".jobs", ".nodes"))
        assert jobs is not None
        assert places is not None
        assert jobs["y"] < 400 < places["y"]
        page.get_by_role("link", name=f"Queued {queued}").click()
        expect(page.locator(".pages span")).to_have_text(f"1 to 50 of {queued} jobs")
        page.get_by_role("link", name="next").click()
        expect(page.locator(".pages span")).to_have_text(f"51 to 100 of {queued} jobs")
        assert page.url == f"{tab.url}/#/?phase=Queued&page=2"
        expect(page.locator(".node")).to_have_count(64)
        expect(page.locator(".strip path").first).to_have_attribute("d", re.compile("^M0 1V"))
        expect(page.locator(".gantt")).to_have_count(0)
        page.locator(".node summary").first.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".gantt .block > rect").first).to_be_visible()
        expect(page.locator(".holders a").first).to_be_visible()
        tab.check()


@pytest.mark.exhaustive
def test_the_picture_is_read_with_keys(tab: Visit) -> None:
    page = tab.open(ADMIN)
    expect(page.locator(".gantt .block > rect")).to_have_count(4)
    page.locator(".gantt").first.focus()
    page.keyboard.press("Home")
    box = page.locator(".scroll .hover").first
    expect(box).to_contain_text("grown · attempt 1")
    page.keyboard.press("ArrowRight")
    expect(box).to_contain_text("grown · attempt 2")
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("grown")
    tab.check()


@pytest.mark.parametrize("width", first(1, [400, 2560]))
@pytest.mark.exhaustive
def test_nothing_is_wider_than_the_window(browser: Browser, service: Service, width: int) -> None:
    size = {"width": width, "height": 900}
    dark = {"color_scheme": "dark", "reduced_motion": "reduce"}
    with visit(browser, service.server.url, viewport=size, **dark) as tab:
        page = tab.open(ADMIN)
        expect(page.locator(".gantt .block > rect")).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"
        assert int(page.evaluate(lightness)) < 60
        assert page.evaluate(CUT) == []
        shown = page.locator(".jobs tbody tr").first.locator("th, td")
        # Without a forecast, its column is left out where a row is a card.
        assert [cell.is_visible() for cell in shown.all()] == [True] * 9 + [width > 820, True]
        page.goto(f"{tab.url}/#/jobs/grown")
        expect(page.locator(".curve .ticks text").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        running = "document.getAnimations().filter((one) => one.playState === 'running').length"
        assert page.evaluate(running) == 0
        tab.check()


def buttons(page: Page) -> set[str]:
    return {str(one.get_attribute("aria-label")) for one in page.locator("main button").all()}


@pytest.mark.exhaustive
def test_who_may_not_act_sees_no_button(browser: Browser, service: Service) -> None:
    """What would be refused is not offered: to viewers nothing, to users their own jobs."""
    service.submit("hers", user="ana", team=None)
    for name, role, jobs in (("eve", Role.VIEWER, set()), ("ana", Role.USER, {"hers"})):
        made = service.admin.post("/tokens", json={"name": name, "role": role}).json()
        with visit(browser, service.server.url) as tab:
            page = tab.open(made["token"])
            expect(page.locator(".nodes .free > rect").first).to_be_visible()
            assert not {label for label in buttons(page) if "node-" in label}
            for job in ("grown", "hers"):
                page.goto(f"{tab.url}/#/jobs/{job}")
                expect(page.locator(".head h1")).to_have_text(job)
                expect(page.locator(".facts")).to_contain_text("Script")
                found = {label for label in buttons(page) if label.endswith(job)}
                assert found == ({f"Suspend {job}", f"Cancel {job}"} if job in jobs else set())
            tab.check()


@pytest.mark.exhaustive
def test_usage_stands_above_the_slots_that_it_is_of(tab: Visit) -> None:
    """The bar of a node has the scale of its slots, moment by moment, and the colour of no job."""
    page = tab.open(ADMIN)
    strip, node = page.locator(".strip").first, page.locator(".node").first
    expect(strip.locator("path")).to_have_attribute("d", re.compile("^M0 1V"))
    expect(strip).not_to_have_attribute("viewBox", "0 0 120 1")

    def aligned() -> bool:
        bar, slot = strip.bounding_box(), node.locator(".free > rect").first.bounding_box()
        if not (bar and slot):  # drawn anew at this moment
            return False
        ends = (bar["x"] - slot["x"], bar["x"] + bar["width"] - slot["x"] - slot["width"])
        return max(map(abs, ends)) < 1.5

    until(aligned, "both begin and end at the same places")
    colours = "all => all.map((one) => getComputedStyle(one).fill)"
    (bar,) = strip.locator("path").evaluate_all(colours)
    jobs = [page.locator(".gantt .train > rect").first.evaluate_all(colours)]
    assert [bar] not in jobs
    legend = page.locator(".nodes .legend")
    assert legend.locator("span").all_inner_texts() == [
        *("bar: share of the slots in use", "a replica trains", "it starts or stops"),
        *("it failed", "free"),
    ]
    expect(page.locator(".jobs")).to_contain_text("R×K: R pipeline replicas of K stages each")
    tab.check()


@pytest.mark.exhaustive
def test_whose_job_it_is_and_what_it_runs(tab: Visit, service: Service) -> None:
    service.control.set_teams(TeamsSpec.model_validate({"teams": [{"name": "vision"}]}))
    arguments = ["--epochs", "3", "--note", "it's one", ""]
    service.submit("whole", user="ana", team="vision", args=arguments)
    page = tab.open(ADMIN, "/jobs/whole")
    facts = page.locator(".facts div")
    expect(facts).to_have_count(4)
    assert dict(text.split("\n", 1) for text in facts.all_inner_texts()) == {
        "Owner": "ana",
        "Team": "vision",
        "Script": SCRIPT,
        "Arguments": "--epochs 3 --note 'it'\\''s one' ''",
    }
    tab.check()


@pytest.mark.exhaustive
def test_the_log_of_a_failed_job_comes_first(tab: Visit) -> None:
    page = tab.open(ADMIN, "/jobs/hostile")
    expect(page.locator(".log")).to_contain_text("first line")
    expect(page.locator(".page h2").first).to_have_text("Log")
    expect(page.locator(".curve:visible")).to_have_count(1)
    expect(page.get_by_text("No reports yet.")).to_be_visible()
    page.goto(f"{tab.url}/#/jobs/grown")
    expect(page.locator(".page h2").first).to_have_text("Progress")
    expect(page.locator(".page h2").last).to_have_text("Log")
    tab.check()


@pytest.mark.exhaustive
def test_gpus_are_shown_with_their_use_and_problems(tab: Visit, service: Service) -> None:
    known = {"index": 3, "name": "NVIDIA H200", "utilization": 0.874, "memory_total": 141 * 2**30}
    device = {**known, "slot": 0, "id": "GPU-1a2b3c4d-1", "job": "grown", "problem": ""}
    slices = {"slot": 1, "id": "MIG-5a6b-1", "job": None, "problem": f"it is lost {HOSTILE}"}
    unknown = dict.fromkeys(("utilization", "memory_used", "memory_total"))
    node = [{**device, "memory_used": 61 * 2**30}, {**known, **slices, **unknown}]
    service.store.devices.keep({"node-a": node})
    page = tab.open(ADMIN)
    lines = page.get_by_role("list", name="GPUs").first.get_by_role("listitem")
    shown = "GPU 3 (GPU-1a2b3c4d) · 87 % · 61 of 141 GiB"
    broken = f"MIG slice of GPU 3 (MIG-5a6b) · left out: it is lost {HOSTILE}"
    expect(lines).to_have_text([f"{shown} · grown", broken])
    expect(page.locator(".nodes .about")).to_contain_text("1 GPU left out")
    page.goto(f"{tab.url}/#/jobs/grown")
    expect(page.locator(".facts")).to_contain_text(f"node-a: {shown}")
    tab.check()


@pytest.mark.exhaustive
def test_hostile_words_are_words(tab: Visit, service: Service) -> None:
    service.control.set_node("node-b", NodeCondition.DRAINING, HOSTILE)
    page = tab.open(ADMIN)
    expect(page.locator(".events")).to_contain_text(f"node node-b is draining: {HOSTILE}")
    expect(page.locator(".jobs")).to_contain_text(HOSTILE)
    page.get_by_role("link", name="hostile", exact=True).first.click()
    expect(page.locator(".log")).to_contain_text(f"first line\n{HOSTILE}")
    expect(page.locator(".summary")).to_contain_text(HOSTILE)
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("window.hacked") is None
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    tab.errors = [error for error in tab.errors if "TrustedHTML" not in error]
    tab.check()


@pytest.mark.exhaustive
def test_nothing_moves_while_the_page_loads_or_scrolls(browser: Browser, service: Service) -> None:
    """A button that moves between the press and the release of the pointer is not clicked."""
    held: list[Route] = []
    with visit(browser, service.server.url, viewport={"width": 1280, "height": 300}) as tab:
        tab.page.route(re.compile("/(attempts|usage)[?]"), lambda route: held.append(route))
        page = tab.open(ADMIN)
        button = page.get_by_role("button", name="Drain node-b")
        expect(button).to_be_attached()
        where = "(one) => one.getBoundingClientRect().top + scrollY"
        before = button.evaluate(where)
        assert before > 300, "it is not in view yet"
        button.scroll_into_view_if_needed()
        expect(page.locator(".gantt .free > rect")).to_have_count(4)
        expect(page.locator(".gantt .block > rect")).to_have_count(0)
        assert button.evaluate(where) == before
        until(lambda: len(held) == 2 or page.wait_for_timeout(10), "both are asked for")
        for route in held:
            route.continue_()
        expect(page.locator(".gantt .block > rect")).to_have_count(4)
        assert button.evaluate(where) == before
        tab.check()


def test_actions_are_confirmed_and_refusals_shown(
    tab: Visit, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tab.open(ADMIN)
    page.get_by_role("button", name="Drain node-b").click()
    page.get_by_role("button", name="Go back").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert service.store.nodes()["node-b"].condition is NodeCondition.READY
    page.get_by_role("button", name="Drain node-b").click()
    page.get_by_label("Reason").fill("a new disk")
    page.get_by_role("button", name="Drain", exact=True).click()
    expect(page.get_by_role("button", name="Undrain node-b")).to_be_visible()
    assert service.store.nodes()["node-b"].reason == "a new disk"
    page.get_by_role("button", name="Undrain node-b").click()
    page.get_by_role("button", name="Undrain", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Drain node-b", exact=True)).to_be_visible()
    page.goto(f"{tab.url}/#/jobs/grown")
    monkeypatch.setattr(service.control, "_stopping", lambda: True)
    page.get_by_role("button", name="Cancel grown").click()
    page.get_by_role("button", name="Cancel", exact=True).click()
    refusal = "the scheduler is being stopped and accepts nothing new"
    expect(page.get_by_role("dialog").get_by_role("alert")).to_have_text(refusal)
    monkeypatch.undo()
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".head .phase")).to_have_text("Stopping")
    tab.errors = [error for error in tab.errors if "503" not in error]  # which was wanted
    tab.check()


@pytest.mark.exhaustive
def test_the_scheduler_goes_away_and_comes_back(tab: Visit, service: Service) -> None:
    page = tab.open(ADMIN)
    expect(page.locator(".state")).to_have_text("live")
    port = int(service.server.url.rpartition(":")[2])
    service.stop_serving()
    expect(page.locator(".state")).to_have_text(
        re.compile(r"^The scheduler has not answered since \d\d:\d\d:\d\d; retrying$")
    )
    service.store.set_node_condition("node-a", NodeCondition.DRAINING, "while nobody listened")
    again(service, port, ADMIN)
    expect(page.locator(".state")).to_have_text("live")
    expect(page.locator(".events")).to_contain_text("while nobody listened")
    texts = page.locator(".events tbody tr").all_inner_texts()
    assert len(texts) == len(set(texts)), "an event is shown twice"
    service.stop_serving()
    again(service, port, "another-token")
    expect(page.get_by_role("alert")).to_contain_text("admin token is in admin.token")
    assert page.evaluate("sessionStorage.length") == 0
    assert [error for error in tab.errors if not error.startswith("Failed to load")] == []


def again(service: Service, port: int, token: str) -> None:
    """Serve once more where it was."""
    service.app = create_app(
        service.store, service.control, state_dir=service.state_dir, admin_token=token
    )
    service.server = HttpServer(service.app, "127.0.0.1", port)
    service.server.start()


@pytest.mark.exhaustive
def test_ticks_and_numbers(tab: Visit) -> None:
    page = tab.open(ADMIN)
    found = page.evaluate("""async () => {
      const { timeTicks, yTicks } = await import("/web/axes.js");
      const { duration, number, seconds, short } = await import("/web/format.js");
      return {
        ticks: [yTicks(0, 0.29, 4), yTicks(0, 8123, 4), yTicks(0, 3, 8, true)],
        times: timeTicks(1000, 1060, 4).map((tick) => tick.value),
        numbers: [0.012345, 1.5, 812.4, 12345, 1.25e-7, 0, null].map((value) => number(value)),
        spelt: [duration(187), duration(270000), seconds(0.0123),
          ...[1.5, 250000, 2.5e6].map((value) => short(value))],
      };
    }""")
    assert found["ticks"] == [[0, 0.1, 0.2, 0.3], [0, 2000, 4000, 6000, 8000, 10000], [0, 1, 2, 3]]
    assert found["times"] == [1005, 1020, 1035, 1050]
    assert found["numbers"] == ["0.0123", "1.50", "812", "12\u202f345", "1.25e-7", "0", "–"]
    assert found["spelt"] == ["3 m 07 s", "3 d 03 h", "12.3 ms", "1.5", "250\u202fk", "2.5\u202fM"]
    tab.check()


@pytest.mark.exhaustive
def test_two_jobs_live(browser: Browser, tmp_path: Path) -> None:
    """Two real jobs come, train and are suspended before the reader's eyes, without a reload."""
    cluster = ClusterSpec(nodes=NODES)
    with (
        Scheduler(tmp_path / "state", cluster, interval=0.3, grace=10.0) as scheduler,
        visit(browser, scheduler.url) as tab,
    ):
        page = tab.open(scheduler.admin_token)
        expect(page.locator(".state")).to_have_text("live")
        expect(page.locator(".jobs")).to_contain_text("no jobs yet")
        page.evaluate("window.untouched = true")
        for name in ("one", "two"):
            scheduler.submit(JobSpec(name=name, script=SCRIPT))
        for name in ("one", "two"):
            expect(page.locator(".jobs tbody tr", has_text=name)).to_contain_text("Running")
        expect(page.locator(".gantt .train > rect").nth(1)).to_be_visible()
        expect(page.locator(".events")).to_contain_text("training since step 1")
        assert scheduler.wait(lambda _jobs: scheduler.store.last_points()["one"].step > 20, 240)
        loss = row(page, "one")[5]
        cell = page.locator(".jobs tbody tr", has_text="one").locator("td").nth(4)
        expect(cell).not_to_have_text(loss)
        page.get_by_role("link", name="one", exact=True).first.click()
        curve = page.get_by_role("img", name=re.compile("^Loss: from"))
        expect(curve.locator(".mean path").first).to_have_attribute("d", re.compile("^M.*L"))
        page.get_by_role("button", name="Suspend one").click()
        page.get_by_role("button", name="Suspend", exact=True).click()
        assert scheduler.wait(lambda jobs: jobs["one"].phase is Phase.SUSPENDED, 240)
        assert scheduler.store.job("one").state.running_on == ()
        expect(page.locator(".head .phase")).to_have_text("Suspended")
        expect(page.get_by_role("button", name="Resume one")).to_be_visible()
        assert page.evaluate("window.untouched")
        tab.check()
