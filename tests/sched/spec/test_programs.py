"""Programs, limits and exit codes in job files: what is refused, and where a module is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.controller.program_check import check_program
from pipollux_sched.spec.job import ExitCodesSpec, JobSpec, SpecError, parse_job


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "script: is missing"),
        ({"script": "a.py", "module": "a"}, "module: is given, and so is script"),
        ({"module": "a", "command": "b"}, "command: is given, and so is module"),
        ({"module": "a.py-b"}, "is not the name of a module"),
        ({"module": "-m"}, "is not the name of a module"),
        ({"command": " "}, "command: is empty"),
        ({"command": "a\0b"}, "NUL"),
        ({"image": "x:1", "python": "/usr/bin/python3"}, "of no use for the image's entry point"),
        ({"image": "x:1", "script": "-m"}, "begins with '-'"),
        ({"image": "x:1", "module": "a", "python": "env"}, "python: 'env' is relative"),
        ({"script": "a", "memory_limit": 0}, "memory_limit: 0 is not allowed"),
        (
            {"script": "a", "memory_limit": "1"},
            "1 is not allowed; it must be a size of at least 16",
        ),
        ({"script": "a", "memory_limit": 2**24 - 1}, "it must be a size of at least 16MiB"),
        (
            {"script": "a", "memory_limit": "1GiB", "resources": {"memory": "2GiB"}},
            "memory_limit: 1073741824 is less than the 2147483648 bytes",
        ),
        ({"script": "a", "max_run_time": "0s"}, "max_run_time"),
        ({"script": "a", "exit_codes": {"fail": [256]}}, "exit_codes.fail"),
        ({"script": "a", "exit_codes": {"fail": [0]}}, "exit_codes.fail"),
        ({"script": "a", "exit_codes": {"fail": [2], "ignore": [2]}}, "2 is in ignore, too"),
        ({"script": "a", "exit_codes": {"never": [2]}}, "unknown field"),
    ],
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job({"name": "toy", **fields})
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("codes", "rules"),
    [
        ({}, {1: "retry", 137: "retry"}),
        ({"fail": (2,)}, {2: "fail", 1: "retry"}),
        ({"retry": (75,), "ignore": (3,)}, {75: "retry", 3: "ignore", 1: "fail"}),
    ],
)
def test_rules(codes: dict[str, Any], rules: dict[int, str]) -> None:
    spec = ExitCodesSpec(**codes)
    assert {status: spec.rule_for(status) for status in rules} == rules


def test_modules_are_found_without_being_run(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (tmp_path / "whole" / "__main__.py").write_text("raise RuntimeError('it was imported')")
    (tmp_path / "whole" / "part.py").touch()
    (tmp_path / "bare").mkdir()  # a namespace package
    (tmp_path / "bare" / "part.py").touch()

    def check(module: str, **fields: Any) -> None:
        check_program(JobSpec(name="x", module=module, working_dir=str(tmp_path), **fields))

    for module in ("whole", "whole.part", "bare.part", "json.tool"):
        check(module)
    for module in ("whole.other", "other", "bare", "whole.part.more", "json"):
        with pytest.raises(SpecError, match=r"there is no module|without a module '__main__'"):
            check(module)
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "far.py").touch()
    with pytest.raises(SpecError):
        check("far")
    check("far", environment={"PYTHONPATH": str(other)})


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    broken.chmod(0o755)
    spec = JobSpec(name="x", script="a.py", python=str(broken), working_dir=str(tmp_path))
    with pytest.raises(SpecError, match="cannot be used: broken"):
        check_program(spec)
