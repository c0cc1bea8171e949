"""The commands of docs/howto/kubernetes-jobs.md, on real kubelets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipollux_sched.lifecycle import Phase

from .cluster import IMAGE, until
from .harness.control_plane import ControlPlane
from .test_resources import Site, trials

pytestmark = pytest.mark.kubernetes
PAGE = (Path(__file__).parents[2] / "docs/howto/kubernetes-jobs.md").read_text()
NAMESPACE = "training"
"""That of the page."""


@pytest.fixture
def site(kubelets: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(kubelets.kubeconfig))
    tmp_path.chmod(0o755)
    kubelets.create_namespace(NAMESPACE)
    site = Site(kubelets, NAMESPACE, tmp_path / "site")
    yield site
    site.close()
    kubelets.delete_namespace(NAMESPACE)
    kubelets.restore()


def example(name: str) -> dict[str, Any]:
    """Return the resource of this name of the page."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in map(yaml.safe_load, blocks) if block["metadata"]["name"] == name]
    return dict(found)


def command(*words: str) -> list[str]:
    """Return the arguments of the only `kubectl` command of the page with these words."""
    lines = re.findall(r"^\$ kubectl (.*)$", PAGE, re.MULTILINE)
    split = [shlex.split(line, comments=True) for line in lines]
    (found,) = [line for line in split if set(words) <= set(line)]
    return found


def columns(text: str) -> list[str]:
    """Return the columns of the first table in a text."""
    return next(line.split() for line in text.splitlines() if line.startswith("NAME"))


def test_a_job(site: Site, kubelets: ControlPlane) -> None:
    """Created, shown, suspended, resumed, awaited and deleted."""
    goal = site.folder / "goal"
    run = f"trap 'exit 143' TERM; echo ready $@; while [ ! -e {goal} ]; do sleep 0.05; done"
    job = example("digits")
    job["spec"] |= {"image": IMAGE, "script": site.script("digits", run)}
    kubelets.kubectl("apply", "--filename=-", text=yaml.safe_dump(job))
    site.await_phase("digits", Phase.RUNNING)
    table = f"kubectl -n {NAMESPACE} get pxj\n"
    (shown,) = [part for part in PAGE.split("$ ") if part.startswith(table) and "digits" in part]
    rows = kubelets.kubectl("-n", NAMESPACE, "get", "pxj").splitlines()
    assert rows[0].split() == columns(shown)
    assert rows[1].split()[:2] == ["digits", "Running"]
    assert "Conditions:" in kubelets.kubectl(*command("describe", "digits"))
    log = [word.replace("-a3-", "-a1-") for word in command("logs", "digits-a3-r0")]
    log.remove("--follow")  # it would wait for the end
    kubelets.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", "pod/digits-a1-r0")
    until(lambda: "ready --epochs 40" in kubelets.kubectl(*log), "the log is shown")
    patch = command("patch", "digits")
    kubelets.kubectl(*patch)
    site.await_phase("digits", Phase.SUSPENDED)
    kubelets.kubectl(*[word.replace("true", "false") for word in patch])
    site.await_phase("digits", Phase.RUNNING)
    goal.touch()
    kubelets.kubectl(*command("wait", "digits"))
    assert site.status("digits")["phase"] == "Complete"
    kubelets.kubectl(*command("delete", "digits"))
    until(lambda: not site.scheduler.jobs() and not site.objects(), "nothing of it is left")


def test_a_sweep(site: Site, kubelets: ControlPlane) -> None:
    """Its progress, its best trial, the log of a trial; deleted while trials run."""
    goal = site.folder / "goal"
    run = (
        f'test "$PIPOLLUX_TRIAL" -lt 3 || while [ ! -e {goal} ]; do sleep 0.05; done\n'
        f'exec python3 {site.folder}/trial.py "$@"'
    )
    sweep = example("rates")
    script = site.script("rates", trials(site, run)["script"])
    sweep["spec"] |= {"image": IMAGE, "script": script}
    kubelets.kubectl("apply", "--filename=-", text=yaml.safe_dump(sweep))

    def row() -> list[str]:
        return kubelets.kubectl("-n", NAMESPACE, "get", "pxj").splitlines()[1].split()

    # The page shows 3 of 8 trials after a while, and no step.
    until(lambda: row()[:3] == ["rates", "Running", "2"] and row()[5] == "3/8", "3 have ended")
    best = yaml.safe_load(kubelets.kubectl(*command("get", "rates")))
    assert best["job"] == f"rates-{best['trial']}"
    assert set(best) == {"job", "parameters", "trial", "value"}
    assert "lr" in best["parameters"]
    kubelets.kubectl(*command("delete", "rates"))
    until(lambda: not site.scheduler.jobs() and not site.objects(), "nothing of it is left")
