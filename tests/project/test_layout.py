"""What a stranger may rely on: names, layers, and that the repository holds together."""

from __future__ import annotations

import importlib
import subprocess
import sys
import typing
import zipfile
from pathlib import Path

import pytest

from tests.programs import run_pipollux

PACKAGES = (
    "pipollux_hybrid",
    "pipollux_perfmodel",
    "pipollux_policies",
    "pipollux_sched",
    "pipollux_simulator",
)


def test_the_folders_above_the_packages_are_no_packages(repository: Path) -> None:
    """`sched` as an import package would be shadowed by the standard library's module."""
    for folder in ("hybrid", "perfmodel", "sched"):
        assert not (repository / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there_and_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__
    for name in getattr(module, "__all__", []):
        thing = getattr(module, name)
        is_alias = typing.get_origin(thing) is not None
        assert thing.__doc__ or is_alias or not callable(thing), (
            f"{package}.{name} says nothing about itself"
        )


@pytest.mark.exhaustive
def test_the_cluster_does_not_import_torch() -> None:
    code = (
        "import sys, pipollux_sched.scheduler, pipollux_sched.cli.demo_run, pipollux_perfmodel\n"
        "print([m for m in ('torch', 'torchgpipe', 'pipollux_hybrid') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_module_says_what_it_is_for(repository: Path) -> None:
    for folder in ("hybrid", "perfmodel", "sched", "examples"):
        for path in (repository / folder).rglob("*.py"):
            assert path.read_text().startswith('"""'), f"{path} begins without a docstring"


def test_the_readme_shows_the_difference_between_the_examples(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    shown = text.split("```diff\n")[1].split("```")[0].splitlines()
    before = (repository / "examples/digits_plain.py").read_text().splitlines()
    after = (repository / "examples/digits.py").read_text().splitlines()
    removed = {line[1:] for line in shown if line.startswith("-")} - {""}
    added = {line[1:] for line in shown if line.startswith("+")} - {""}
    bodies = [
        [line for line in lines[lines.index("from __future__ import annotations") :] if line]
        for lines in (before, after)
    ]
    assert removed <= set(before)
    assert added <= set(after)
    rest = [line for line in bodies[0] if line not in removed]
    assert rest == [line for line in bodies[1] if line not in added]
    assert len(added) <= 14, "about ten lines"


def test_the_readme_shows_what_plan_prints(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    command = "pipollux plan --cluster examples/cluster.yaml --jobs examples/jobs.yaml"
    shown = text.split(f"$ {command}\n")[1].split("```")[0].strip()
    printed = run_pipollux(*command.split()[1:], folder=repository)
    assert printed.returncode == 0, printed.stderr
    lines = [line.rstrip() for line in printed.stdout.strip().splitlines()]
    assert shown.splitlines() == lines


def test_the_wheel_holds_everything(repository: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom hatchling.builders.wheel import WheelBuilder\n"
        "print(next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard'])))"
    )
    built = subprocess.run(
        [sys.executable, "-c", code, str(repository), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    names = zipfile.ZipFile(built.stdout.strip()).namelist()
    web = repository / "sched/pipollux_sched/server/web"
    charts = repository / "sched/pipollux_sched/report/charts"
    for name in (
        "pipollux/py.typed",
        "pipollux_hybrid/py.typed",
        "pipollux_perfmodel/__init__.py",
        "pipollux_sched/report/template.html.j2",
        "pipollux_sched/report/simulation/page.html.j2",
        "pipollux_sched/store/migrations/env.py",
        *(f"pipollux_sched/server/web/{path.name}" for path in web.iterdir()),
        *(f"pipollux_sched/report/charts/{path.name}" for path in charts.glob("*.js")),
        *(
            f"pipollux_sched/report/charts/vendor/{n}"
            for n in ("plot.min.js", "LICENSE", "README.md")
        ),
        "pipollux_sched/store/migrations/versions/v0006_first.py",
        "pipollux_sched/examples/demo-jobs.yaml",
        "pipollux_sched/examples/char_lm.py",
    ):
        assert name in names
    assert not any(name.startswith(("tests/", "hybrid/", "sched/")) for name in names)
