"""The documentation site builds without a warning, and its links and examples are right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import TimeoutError as NotYet

from pipollux_sched.cli.app import COMMANDS, app, load_command
from pipollux_sched.spec.cluster import load_cluster
from pipollux_sched.spec.job import load_jobs
from pipollux_sched.spec.teams import load_teams
from tests.programs import Forked
from tests.project import pages
from tests.sched.server.browser import PATIENCE_MS, chromium, find_chromium
from tests.services import service_missing

ROOT_PAGES = [pages.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
EXAMPLES = [pages.ROOT / "README.md", *pages.site_pages(), *pages.benchmark_pages()]
LOADERS = {"jobs": load_jobs, "nodes": load_cluster, "teams": load_teams}
"""What reads a file with this key at its top."""
SHELLS = ("console", "bash", "sh", "shell")


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, without the API pages of pdoc."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_has_every_page_and_needs_no_other_host(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert {Path(name) for name in pages.in_navigation()} <= built
    names = {f"benchmarks/{page.parent.name}.md" for page in pages.benchmark_pages()}
    assert {Path(name) for name in names} <= built
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="([^"]+)"', path.read_text()
        )
        assert loaded
        assert [url for url in loaded if "//" in url and not url.startswith("data:")] == []
    assert (site / "search/search_index.js").read_text().startswith("var __index = ")


def test_the_navigation_has_every_page_once() -> None:
    listed = pages.in_navigation()
    assert len(listed) == len(set(listed))
    folders = {Path(name).parent for name in listed} - {Path()}
    assert len(folders) == 5
    files = {
        str(path.relative_to(pages.DOCS))
        for folder in folders
        for path in (pages.DOCS / folder).rglob("*.md")
    }
    assert {name for name in listed if "/" in name} == files
    assert all((pages.DOCS / name).is_file() for name in listed)


@pytest.mark.parametrize("page", ROOT_PAGES, ids=lambda page: page.name)
def test_links_of_the_repository_lead_somewhere(page: Path) -> None:
    links = pages.LINK.findall(pages.prose_of(page))
    assert links
    for link in links:
        target, _, anchor = link.partition("#")
        if target.startswith(("https://", "mailto:")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in pages.anchors_of(path.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(pages.ROOT)))
def test_examples_are_valid(page: Path, tmp_path: Path) -> None:
    problems = []
    for block in pages.blocks_of(page):
        try:
            if block.language == "python":
                compile(block.text, str(block), "exec")
            elif block.language in SHELLS:
                for command in commands_in(block):
                    check_command(command)
            elif block.language in ("yaml", "yml"):
                check_yaml(block.text, tmp_path)
        except Exception as error:  # each is a problem of the page
            problems.append(f"{block}: {error}")
    for command in re.findall(r"`(pipollux [a-z][^`]*)`", pages.prose_of(page)):
        try:
            check_command(command)
        except (AssertionError, ValueError) as error:
            problems.append(f"{page.name}: `{command}`: {error}")
    assert problems == []


def commands_in(block: pages.Block) -> list[str]:
    """The commands of a block: what follows `$ ` in a console's, all lines in a script."""
    lines, found = re.sub(r"\\\n", " ", block.text).splitlines(), []
    while lines:
        command = lines.pop(0)
        if block.language == "console" and not command.startswith("$ "):
            continue  # what a command has printed
        while not is_complete(command):
            command += "\n" + lines.pop(0)
        found.append(command.removeprefix("$ "))
    return found


def is_complete(command: str) -> bool:
    """Whether a command ends at the end of its line: no quotation is open."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


@cache
def options(name: str | None) -> dict[str, bool]:
    """Every spelling of every option of a command, None: of all commands; whether it is a flag."""
    from typer.main import get_command

    command = get_command(app) if name is None else load_command(name)
    found = {"--help": True, "-h": True}
    for one in command.params:
        if one.param_type_name == "option":
            found |= dict.fromkeys((*one.opts, *one.secondary_opts), one.is_flag)
    return found


def check_command(line: str) -> None:
    """Check the options of each `pipollux` of a line of a shell; leave other programs alone."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    words = list(lexer)
    for number, word in enumerate(words):
        if word == "pipollux" or word.endswith("/bin/pipollux"):
            rest = words[number + 1 :]
            end = next((n for n, x in enumerate(rest) if set(x) <= set("|&;()")), len(rest))
            check_words(rest[:end])


def check_words(words: list[str]) -> None:
    """Check the words after `pipollux`: options of all commands, a command, its options."""
    known, number = options(None), 0
    while number < len(words) and words[number].startswith("-"):
        spelled, value, _ = words[number].partition("=")
        assert spelled in known, f"there is no option {spelled} of all commands"
        number += 1 if known[spelled] or value else 2
    if number >= len(words):
        return
    name = words[number]
    if not re.fullmatch(r"[a-z]+", name):
        return  # a placeholder, such as COMMAND
    assert name in COMMANDS, f"there is no command {name}"
    given = [word.partition("=")[0] for word in words[number + 1 :]]
    for word in given:
        if word == "--":
            break
        if re.match(r"--?[a-z]", word):
            assert word in options(name), f"{name} has no option {word}"


def check_yaml(text: str, folder: Path) -> None:
    """Load a block as YAML, and as a file of jobs, a cluster or teams where it is one."""
    documents = list(yaml.safe_load_all(text))
    (folder / "file.yaml").write_text(text)
    for key, load in LOADERS.items():
        if len(documents) == 1 and isinstance(documents[0], dict) and key in documents[0]:
            load(folder / "file.yaml")


RUN = [block for page in EXAMPLES for block in pages.blocks_of(page) if block.runs]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_complete_examples_run(block: pages.Block, tmp_path: Path) -> None:
    assert block.language == "python"
    script = tmp_path / "example.py"
    script.write_text(block.text)
    with Forked(script, folder=tmp_path) as running:
        assert running.wait() == 0, running.errors


@pytest.mark.exhaustive
def test_search_works_in_files(site: Path) -> None:
    """Where no server is: the browser starts no worker then, and the index is a script."""
    path = find_chromium()
    if path is None:
        service_missing("the search runs in a browser")
    with chromium(path) as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{site}/reference/cli.html")
        query = page.locator("[data-md-component=search-query]")
        found = page.locator(".md-search-result__link").first
        for _ in range(PATIENCE_MS // 2000):  # keys are heard once the index has been read
            query.fill("heartbeat")
            query.press("End")
            with suppress(NotYet):
                found.wait_for(state="attached", timeout=2000)
                break
        assert str(found.get_attribute("href")).startswith(f"file://{site}/")
        assert [url for url in asked if not url.startswith(("file:", "about:", "data:"))] == []


@pytest.mark.parametrize(
    "line",
    [
        "pipollux sumbit jobs.yaml",
        "pipollux submit jobs.yaml --watch",
        "pipollux --state-dir x jobs",
        "cat x | pipollux jobs --nothing",
        ".venv/bin/pipollux serve --cluster=x --polcy fifo &",
    ],
)
def test_the_check_of_commands_finds_wrong_ones(line: str) -> None:
    with pytest.raises(AssertionError, match=r"there is no|has no option"):
        check_command(line)


def test_the_check_of_files_finds_wrong_ones(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"num_stage\b"):
        check_yaml("jobs: [{name: a, script: a.py, num_stage: 2}]", tmp_path)
    check_yaml("jobs: [{name: a, script: a.py, num_stages: 2}]", tmp_path)
