"""A real browser, headless, that looks at the web page as its user would."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import Browser, Error, Page, Route, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
"""What a job may have for a message or in its log: words, and no more."""
NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
"""What becomes of all that Chromium has asked for when an interface comes or goes on this machine,
as in tests of several hosts."""
PATIENCE_MS = 120_000
"""How long something may take to show: machines that run tests are busy."""
expect.set_options(timeout=PATIENCE_MS)


def find_chromium() -> str | None:
    """Where Chromium is; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=list(FLAGS), headless=True, timeout=120_000
        )
        try:
            yield browser
        finally:
            # While it runs, tests take no notice of what it starts; nothing of it may stay.
            started = _processes()
            browser.close()
            _, left = psutil.wait_procs({*started, *_processes()}, timeout=240)
            assert left == [], f"the browser left {left}"


def _processes() -> list[psutil.Process]:
    """Every process of a browser below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "chrom" in process.name():
                found.append(process)
    return found


@dataclass
class Visit:
    """One tab, with what went wrong in it and what it asked for."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda said: self._note(said.type, said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and NETWORK_CHANGED not in text:  # the page asks again
            self.errors.append(text)

    def open(self, token: str | None, place: str = "/") -> Page:
        """Open a page of the scheduler, as the link does that `pipollux serve` prints."""
        self.page.goto(self.url + (f"/#token={token}" if token else "/"))
        if place != "/":
            self.page.goto(f"{self.url}/#{place}")
        return self.page

    def check(self) -> None:
        """Nothing failed, and nobody else was asked."""
        assert self.errors == []
        assert self.requests
        # The frames of a browser's own error page are no requests of ours.
        assert {url for url in self.requests if not url.startswith(f"{self.url}/")} == set()


@contextmanager
def visit(browser: Browser, url: str, **options: object) -> Iterator[Visit]:
    context = browser.new_context(**options)  # type: ignore[arg-type]  # handed on
    context.route(_is_of_page, _fetch)
    try:
        yield Visit(context.new_page(), url)
    finally:
        context.close()


def _is_of_page(url: str) -> bool:
    """Whether something is a file of the web page, for which no page would ask again."""
    found = urlsplit(url)
    return found.scheme.startswith("http") and (found.path == "/" or found.path.startswith("/web/"))


def _fetch(route: Route) -> None:
    """Bring a file past Chromium's network: see `NETWORK_CHANGED`."""
    with suppress(Error):  # a tab that was closed, or went elsewhere, needs no answer any more
        try:
            response = route.fetch()
        except Error:  # there is no server
            route.abort()
        else:
            route.fulfill(response=response)
