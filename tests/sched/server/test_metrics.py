"""The page on metrics lists each one that `/metrics` gives, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pipollux_sched.server.prometheus import REASONS
from tests.sched.supervised import Service, report

ROW = re.compile(
    r"\| `(?P<name>pipollux_\w+)` \| (?P<type>\w+) \| (?P<labels>.*?) ?\| (?P<text>.+) \|"
)
DEVICE = {
    "slot": 0,
    "id": "GPU-0",
    "index": 0,
    "name": "NVIDIA H200",
    "job": "toy",
    "problem": "",
    "utilization": 0.5,
    "memory_used": 1,
    "memory_total": 2,
}
FOUND = tuple[str, frozenset[str]]


def test_the_page_lists_every_metric(repository: Path, tmp_path: Path) -> None:
    shown = (repository / "docs/reference/metrics.md").read_text()
    listed = [row for line in shown.splitlines() if (row := ROW.fullmatch(line))]
    page: dict[str, FOUND] = {
        row["name"]: (row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"])))
        for row in listed
    }
    with Service(tmp_path / "state") as service:
        job = service.submit("toy", ["node-a"])
        job.post("/jobs/toy/reports", json=report(goodput=3.0)).raise_for_status()
        service.store.devices.keep({"node-a": [DEVICE]})
        assert service.client(None).get("/jobs").status_code == 401
        text = service.admin.get("/metrics").raise_for_status().text
    assert dict(sorted(page.items())) == dict(sorted(given(text).items()))
    assert len(listed) == len(page)
    for status, reason in REASONS.items():
        assert f"| `{reason}` | {status} |" in shown


def given(text: str) -> dict[str, FOUND]:
    """Return the type and the labels of each metric in Prometheus' text format."""
    found: dict[str, FOUND] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = frozenset(label for sample in family.samples for label in sample.labels)
        found[name] = family.type, labels - {"le"}
    return found
