"""A job that pushes and pulls as a resource: its replicas and its server are pods."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipollux_sched.lifecycle import Phase
from tests.sched.scripts import PUSH_PULL
from tests.sched.test_push_pull_jobs import epochs_of, kinds_of

from .cluster import Cluster, until
from .test_resources import Site

EPOCHS = 12


@pytest.fixture
def site(
    cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    tmp_path.chmod(0o755)
    site = Site(
        cluster, namespace, tmp_path / "site", allocations={"pp": ["n1", "n2"]}, python="python"
    )
    yield site
    site.close()


def kill_pod(results: Path, replica: int) -> None:
    """Send SIGKILL to all processes of the pod of a replica."""
    wanted = {"RESULTS": str(results), "PIPOLLUX_REPLICA": str(replica)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if wanted.items() <= process.environ().items():
                process.send_signal(signal.SIGKILL)


@pytest.mark.exhaustive
def test_one_replica_is_killed_and_the_other_goes_on(site: Site) -> None:
    """In one attempt to the last epoch; each epoch takes all samples, none is lost."""
    results, goes_on = site.folder / "results", site.folder / "goes-on"
    results.mkdir()
    results.chmod(0o777)
    environment = {"RESULTS": str(results), "EPOCHS": str(EPOCHS), "GOES_ON": str(goes_on)}
    words = {"servers": 1, "maxRestarts": 0, "environment": environment}
    site.apply("pp", PUSH_PULL.read_text(), **words)
    status = site.await_phase("pp", Phase.RUNNING)
    assert (status["replicas"], sorted(status["nodes"])) == (2, ["n1", "n2"])
    until(lambda: max(epochs_of(results), default=0) > 1, "they train")
    assert {path.name for path in results.iterdir()} == {"1-0.txt", "1-1.txt"}
    kill_pod(results, 1)
    goes_on.touch()
    status = site.await_phase("pp", Phase.COMPLETE)
    assert status["attempt"] == 1
    assert kinds_of(site.scheduler).count("survived") == 1
    taken = epochs_of(results)
    assert set(taken) == set(range(EPOCHS))
    missing = {epoch: set(range(120)) - set(taken[epoch]) for epoch in taken}
    assert not any(missing.values()), missing
    last = Counter(range(120))  # once, by the replica that is left
    assert taken[EPOCHS - 1] == last
    until(lambda: not site.cluster.pods(site.namespace), "its pods are gone")
