"""The API reference is built from docstrings, without a warning, and shows every public name."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pipollux
import pipollux_perfmodel
from tests.programs import Forked

BUILD = (
    "import sys, pathlib, warnings\n"
    "warnings.simplefilter('error')\n"
    "sys.path.insert(0, 'docs')\n"
    "import api\n"
    "api.build(pathlib.Path(sys.argv[1]), ['pipollux'])\n"
)


@pytest.fixture(scope="module")
def page(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of `pipollux`."""
    folder = tmp_path_factory.mktemp("site")
    script = folder / "build.py"
    script.write_text(BUILD)
    with Forked(script, [str(folder)], folder=repository) as build:
        assert build.wait() == 0, build.errors
    return (folder / "pipollux.html").read_text()


def without_sources(page: str) -> str:
    return re.sub(r'<div class="pdoc-code codehilite">.*?</div>', "", page, flags=re.DOTALL)


def section(page: str, name: str) -> str:
    """What the page says about a name, without tags."""
    begin = page.index(f'<section id="{name}">')
    end = page.find('<section id="', begin + 1)
    text = without_sources(page[begin:] if end < 0 else page[begin:end])
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def words(text: str) -> str:
    """Words alone: without marks, roles, and the modules in front of names."""
    text = re.sub(r":[a-z]+:(?=`)|\b(?:\w+\.)+(?=\w)", "", text)
    return " ".join(re.findall(r"\w+", text))


@pytest.mark.parametrize("name", pipollux.__all__)
def test_a_public_name_is_there_with_its_docstring(page: str, name: str) -> None:
    thing = getattr(pipollux, name)
    shown = words(section(page, name))
    if thing.__module__.startswith("pipollux_hybrid"):
        assert words(thing.__doc__.split("\n\n")[0]) in shown
    else:  # torchgpipe's, whose docstrings are written for another tool
        assert words(thing.__doc__)[:20] in shown


def test_sections_are_rendered(page: str) -> None:
    wrapper = " ".join(section(page, "HybridParallel").split())
    for heading in ("Example:", "Arguments:", "Raises:"):
        assert heading in wrapper
    assert "num_microbatches: Number M of micro-batches" in wrapper
    assert not re.findall(r":(?:class|func|meth|mod|attr):`", without_sources(page))


@pytest.mark.parametrize("package", [pipollux, pipollux_perfmodel], ids=lambda x: x.__name__)
def test_the_site_links_to_every_name(repository: Path, package: ModuleType) -> None:
    text = (repository / "docs/reference/python.md").read_text()
    linked = re.findall(rf"\.\./api/{package.__name__}\.html#(\w+)", text)
    assert sorted(linked) == sorted(package.__all__)


@pytest.mark.exhaustive
def test_every_package_has_pages(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "docs/api.py", str(tmp_path)]
    subprocess.run(command, cwd=repository, check=True, timeout=240)
    pages = {path.name for path in tmp_path.iterdir()}
    assert {
        "index.html",
        "pipollux.html",
        "pipollux_perfmodel.html",
        "pipollux_sched.html",
    } <= pages
