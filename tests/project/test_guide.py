"""The guide tells of every option and every variable that there is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import pipollux
from pipollux_hybrid.job import env
from pipollux_sched.spec.cluster import load_cluster


def table_after(repository: Path, page: str, heading: str) -> str:
    """The first table after some words of a page."""
    text = (repository / "docs" / "howto" / page).read_text()
    rows = text[text.index(heading) :].split("\n")
    begin = next(n for n, row in enumerate(rows) if row.startswith("|"))
    end = next(n for n, row in enumerate(rows) if n > begin and not row.startswith("|"))
    return "\n".join(rows[begin:end])


@pytest.mark.parametrize(
    ("page", "heading", "function", "left_out"),
    [
        (
            "train.md",
            "`HybridParallel(module, optimizer",
            pipollux.HybridParallel,
            {"module", "optimizer"},
        ),
        (
            "data.md",
            "`AdaptiveDataLoader(dataset",
            pipollux.AdaptiveDataLoader,
            {"dataset", "options"},
        ),
        (
            "batch-size.md",
            "`loader.autoscale_batch_size(",
            pipollux.AdaptiveDataLoader.autoscale_batch_size,
            {"self"},
        ),
        ("train.md", "`init_process_group(…)`", pipollux.init_process_group, set()),
    ],
)
def test_every_argument_has_a_row(
    repository: Path, page: str, heading: str, function: Callable[..., object], left_out: set[str]
) -> None:
    table = table_after(repository, page, heading)
    for name in inspect.signature(function).parameters.keys() - left_out:
        assert re.search(rf"^\| [^|]*`{name}`", table, re.MULTILINE), f"no row for {name}"


def test_every_variable_has_a_row(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "protocol.md").read_text()
    read = {variable.name for variable in env.VARIABLES.values()}
    assert len(read) > 10
    assert read <= set(re.findall(r"^\| `(PIPOLLUX_[A-Z_]+)`", page, re.MULTILINE))


def test_a_machine_with_gpus_may_have_cpu_slots(repository: Path, tmp_path: Path) -> None:
    """The file of the page is one that the scheduler takes."""
    text = (repository / "docs/howto/jobs.md").read_text().partition("## Nodes of one machine")[2]
    found = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    path = tmp_path / "cluster.yaml"
    path.write_text(found[1])
    nodes = {node.kind: node for node in load_cluster(path).nodes}
    assert (nodes["gpu"].gpu_type, nodes["cpu"].slots) == ("a100", 8)
