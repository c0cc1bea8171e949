"""What a job may wait for, and what is refused about it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_sched.spec.dependencies import Dependency, find_cycle, parse_dependency
from pipollux_sched.spec.job import JobSpec, SpecError, load_jobs
from tests.extent import examples


def file_of(folder: Path, **after: str) -> Path:
    lines = [f"- {{name: {name}, script: a.py, after: {text}}}" for name, text in after.items()]
    path = folder / "jobs.yaml"
    path.write_text("\n".join(["jobs:", *lines]))
    return path


def test_names_and_conditions_are_read(tmp_path: Path) -> None:
    path = file_of(tmp_path, a="[]", b="[a, {job: c, when: ended}]", c="[{job: a, when: failed}]")
    a, b, c = load_jobs(path)
    assert a.after == ()
    assert b.after == (Dependency(job="a"), Dependency(job="c", when="ended"))
    assert c.after == (Dependency(job="a", when="failed"),)
    assert JobSpec.model_validate(b.model_dump(mode="json")) == b


@pytest.mark.parametrize(
    ("after", "complaint"),
    [
        ("[A]", "jobs[0].after[0].job: 'A' is not a name"),
        ("[{job: b, when: done}]", 'jobs[0].after[0].when: "done"'),
        ("[{when: ended}]", "jobs[0].after[0].job: is missing"),
        ("[b, {job: b, when: ended}]", "jobs[0].after: names 'b' twice; name each job once"),
        ("b", 'jobs[0].after: "b" is not allowed; it must be a list of names'),
        (
            "[a]",
            "jobs[0].after: jobs that wait for each other in a circle never start (a after a); "
            "remove one of the dependencies",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, after: str, complaint: str) -> None:
    path = file_of(tmp_path, a=after)
    with pytest.raises(SpecError) as refused:
        load_jobs(path)
    assert str(refused.value).startswith(f"{path}:2: {complaint}")
    assert "\n" not in str(refused.value)


def test_a_circle_is_named_where_it_begins(tmp_path: Path) -> None:
    path = file_of(tmp_path, a="[b]", b="[c, d]", c="[]", d="[b]")
    with pytest.raises(SpecError, match=r":3: jobs\[1\]\.after: .* \(b after d after b\)"):
        load_jobs(path)


@examples(100)
@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdefg"), max_size=4)))
def test_there_is_a_circle_where_the_jobs_have_no_order(graph: dict[str, list[str]]) -> None:
    left = dict(graph)
    while free := [name for name in left if not set(left[name]) & left.keys()]:
        for name in free:
            del left[name]
    cycle = find_cycle(graph)
    assert (cycle is None) == (not left)
    if cycle is not None:
        assert cycle[0] == cycle[-1]
        assert all(after in graph[name] for name, after in pairwise(cycle))


def test_dependencies_of_an_option() -> None:
    assert parse_dependency("prepare") == Dependency(job="prepare")
    assert parse_dependency("prepare:failed") == Dependency(job="prepare", when="failed")
    for bad in ("", ":ended", "prepare:", "prepare:done", "Prepare"):
        with pytest.raises(ValueError):  # noqa: PT011  # the option has its own sentence
            parse_dependency(bad)
