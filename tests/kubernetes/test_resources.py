"""Jobs and their custom resources, with a whole scheduler on a cluster in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.resources.core_v1 import Event, Pod, Secret, Service
from lightkube.types import PatchType

from pipollux_sched.backend.kubernetes.api import Job
from pipollux_sched.backend.kubernetes.job_resource import (
    refused_status,
    succeeding_status,
    view_job,
    waiting_status,
)
from pipollux_sched.backend.kubernetes.names import SCHEDULER_LABEL
from pipollux_sched.backend.kubernetes.options import KubernetesOptions
from pipollux_sched.lifecycle import Phase
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.server.address import ServerAddress
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StateDir
from tests.sched.scripts import TRIAL

from .cluster import IMAGE, Cluster, until
from .engines import RUNS, security, shell

CRD = Path(__file__).parents[2] / "deploy/kubernetes/crd.yaml"


class Site:
    """A scheduler of a cluster, which may be killed and started again.

    Args:
        cluster: where its jobs run; pods reach it there.
        namespace: of the jobs.
        folder: of the test, the same inside of containers.
        allocations: the node of each replica by job; None: the policy decides.
        options: of the backend that differ from the usual ones, by which scripts are shell scripts.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        folder: Path,
        *,
        allocations: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self._allocations = allocations
        folder.mkdir()
        cluster.declare(CRD)
        chosen: dict[str, Any] = {
            "namespace": namespace,
            "python": shell(folder),
            "checkpoint_host_path": str(folder),
            "checkpoint_folder": str(folder),
            "pod_security": security(cluster),
        }
        self.options = KubernetesOptions(**{**chosen, **options})
        self.client: Client = cluster.client(namespace)
        self.scheduler = self.serve()

    def serve(self) -> Scheduler:
        """Start a scheduler."""
        self.scheduler = Scheduler(
            StateDir(self.folder / "state"),
            None,
            address=ServerAddress(host=self.cluster.address),
            backend="kubernetes",
            backend_options=self.options,
            interval=1.0,
            grace=20.0,
            allocations=self._allocations,
        )
        self.scheduler.start()
        return self.scheduler

    def script(self, name: str, text: str) -> str:
        """Return the path of a shell script, the same inside of containers."""
        path = self.folder / f"{name}.sh"
        path.write_text(text + "\n")
        return str(path)

    def apply(self, name: str, script: str, **spec: Any) -> None:
        """Create a resource."""
        fields = {"script": self.script(name, script), "image": IMAGE, "maxReplicas": 2, **spec}
        given = {field: value for field, value in fields.items() if value is not None}
        self.client.create(Job(metadata={"name": name}, spec=given))

    def resource(self, name: str) -> Any:
        """Return a resource, None if there is none."""
        try:
            return self.client.get(Job, name)
        except ApiError as error:
            if error.status.code == 404:
                return None
            raise

    def status(self, name: str) -> dict[str, Any]:
        return (self.resource(name) or {}).get("status") or {}

    def await_phase(self, name: str, phase: Phase) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status.get("phase") == phase else None

        return until(reached, f"the resource {name} is {phase}, and not {self.status(name)}")

    def objects(self) -> list[str]:
        """Return what there is of jobs in the namespace: resources, pods, secrets, services."""
        label = {SCHEDULER_LABEL: self.options.scheduler}
        made = [f"Job {job.metadata.name}" for job in self.client.list(Job)]
        for kind in (Pod, Secret, Service):
            found = self.client.list(kind, labels=label)
            made += [f"{kind.__name__} {thing.metadata.name}" for thing in found]
        return made

    def close(self) -> None:
        self.scheduler.stop(grace=20.0)
        self.client.close()


@pytest.fixture
def site(
    cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    tmp_path.chmod(0o755)
    site = Site(cluster, namespace, tmp_path / "site")
    yield site
    site.close()


def true(status: dict[str, Any]) -> set[str]:
    """Return the conditions that hold."""
    return {entry["type"] for entry in status["conditions"] if entry["status"] == "True"}


def test_from_kubectl_apply_to_complete(site: Site) -> None:
    """The status tells what becomes of a job; its pods belong to the resource; events say so."""
    goal = site.folder / "goal"
    site.apply("alpha", f"echo ready; while [ ! -e {goal} ]; do sleep 0.5; done", numStages=2)
    status = site.await_phase("alpha", Phase.RUNNING)
    assert status["replicas"] >= 1
    assert status["numStages"] == 2
    assert set(status["nodes"]) <= {"n1", "n2"}
    assert true(status) == {"Running"}
    (owner,) = next(iter(site.cluster.pods(site.namespace).values())).metadata.ownerReferences
    assert (owner.kind, owner.name) == ("PipolluxJob", "alpha")
    goal.touch()
    status = site.await_phase("alpha", Phase.COMPLETE)
    assert "Complete" in true(status)
    assert status["replicas"] == 0
    reasons = {event.involvedObject.name for event in site.client.list(Event)}
    assert "alpha" in reasons
    site.client.delete(Job, "alpha")
    until(lambda: "alpha" not in site.scheduler.jobs(), "the job is deleted, too")


def test_suspend_and_resume_from_either_side(site: Site) -> None:
    """`spec.suspend` and `pipollux suspend` are the same thing."""
    site.apply("alpha", RUNS, suspend=True)
    status = site.await_phase("alpha", Phase.SUSPENDED)
    assert true(status) == {"Suspended"}
    assert "alpha" not in site.scheduler.jobs()  # nothing has started for a moment
    site.client.patch(Job, "alpha", {"spec": {"suspend": False}}, patch_type=PatchType.MERGE)
    site.await_phase("alpha", Phase.RUNNING)
    site.client.patch(Job, "alpha", {"spec": {"suspend": True}}, patch_type=PatchType.MERGE)
    status = site.await_phase("alpha", Phase.SUSPENDED)
    assert status["replicas"] == 0
    site.scheduler.control.resume("alpha")
    site.await_phase("alpha", Phase.RUNNING)
    until(lambda: site.resource("alpha")["spec"]["suspend"] is False, "the resource says so")
    site.scheduler.control.suspend("alpha")
    site.await_phase("alpha", Phase.SUSPENDED)
    until(lambda: site.resource("alpha")["spec"]["suspend"] is True, "the resource says so")


def test_deleted_by_either_side(site: Site) -> None:
    """A deleted resource ends its job and its pods; a deleted job takes its resource along."""
    site.apply("alpha", RUNS)
    site.await_phase("alpha", Phase.RUNNING)
    site.client.delete(Job, "alpha")
    until(lambda: "alpha" not in site.scheduler.jobs(), "the job is deleted")
    until(lambda: not site.cluster.pods(site.namespace), "its pods are gone")
    site.apply("beta", "exit 0")
    site.await_phase("beta", Phase.COMPLETE)
    site.scheduler.control.delete("beta")
    until(lambda: site.resource("beta") is None, "the resource is deleted")


@pytest.mark.exhaustive
def test_created_again_while_the_earlier_job_ends(site: Site) -> None:
    """Such a resource says what it waits for, and its job follows."""
    goal, ready = site.folder / "goal", site.folder / "ready"
    site.apply("alpha", f"trap '' TERM; touch {ready}; while [ ! -e {goal} ]; do sleep 0.5; done")
    until(ready.exists, "its replica does not hear what ends others")
    site.client.delete(Job, "alpha")
    until(lambda: site.resource("alpha") is None, "the resource is gone")
    site.apply("alpha", "exit 0")
    status = site.await_phase("alpha", Phase.CREATED)
    assert status["reason"] == "EarlierJobEnds"
    assert "earlier job of this name" in status["message"]
    goal.touch()
    assert site.await_phase("alpha", Phase.COMPLETE)["reason"] != "EarlierJobEnds"


@pytest.mark.parametrize("tell", [refused_status, succeeding_status, waiting_status])
def test_what_is_told_again_is_no_change(tell: Callable[..., dict[str, Any]]) -> None:
    """Otherwise each look at a resource that waits would write its status, which is a change."""
    message = ("it is refused",) if tell is refused_status else ()
    resource = view_job({"metadata": {"name": "alpha"}, "spec": {}})
    first = tell(resource, *message, 1.0)
    told = replace(resource, status=first)
    assert tell(told, *message, 1000.0) == first
    other = {**first, "conditions": [{**first["conditions"][0], "reason": "Other"}]}
    later = tell(replace(resource, status=other), *message, 1000.0)
    assert (
        later["conditions"][0]["lastTransitionTime"] != first["conditions"][0]["lastTransitionTime"]
    )


def trials(site: Site, script: str) -> dict[str, Any]:
    """Return fields of a resource whose script is run with parameters, and may report a metric."""
    shutil.copy(TRIAL, site.folder / "trial.py")
    return {"script": script, "args": ["--lr", "{lr}"], "maxReplicas": 1}


def test_a_sweep_is_one_object(site: Site) -> None:
    """Its status has the trials' progress and the best of them, and it owns their pods."""
    goal = site.folder / "goal"
    template = {"metadata": {"labels": {"kind": "trial"}}}
    sweep = {"grid": {"lr": [0.1, 0.01, 0.001]}, "metric": "error", "maxParallel": 2}
    run = (
        f'python3 {site.folder}/trial.py "$@" || exit 1\nwhile [ ! -e {goal} ]; do sleep 0.5; done'
    )
    site.apply("rates", sweep=sweep, template=template, **trials(site, run))
    held = until(lambda: len(site.cluster.pods(site.namespace, kind="trial")) == 2, "2 trials run")
    assert held
    owners = [
        pod.metadata.ownerReferences[0].name
        for pod in site.cluster.pods(site.namespace, kind="trial").values()
    ]
    assert owners == ["rates", "rates"]
    until(lambda: site.status("rates").get("replicas") == 2, "their replicas are counted")
    told = site.status("rates")
    assert (told["phase"], told["sweep"]["progress"]) == ("Running", "0/3")
    assert (told["sweep"]["unfinished"], told["sweep"]["waiting"]) == (2, 1)
    assert [made.metadata.name for made in site.client.list(Job)] == ["rates"]
    goal.touch()
    done = site.await_phase("rates", Phase.COMPLETE)
    until(lambda: site.status("rates")["sweep"]["progress"] == "3/3", "all have ended")
    assert "Complete" in true(done)
    found = site.status("rates")["sweep"]
    assert (found["complete"], found["trials"], found["metric"]) == (3, 3, "error")
    best = {"trial": 1, "job": "rates-1", "value": 0.5, "parameters": {"lr": 0.01}}
    assert found["best"] == best
    site.client.delete(Job, "rates")
    until(lambda: not site.scheduler.jobs(), "the sweep and its trials are deleted")
    until(lambda: not site.objects(), "the cluster has nothing of them")


@pytest.mark.exhaustive
def test_a_deleted_sweep_ends_its_trials(site: Site) -> None:
    sweep = {"list": [{"lr": 1}, {"lr": 2}]}
    site.apply("rates", sweep=sweep, **trials(site, RUNS))
    until(lambda: len(site.cluster.pods(site.namespace)) == 2, "2 trials run")
    site.client.patch(Job, "rates", {"spec": {"suspend": True}}, patch_type=PatchType.MERGE)
    site.await_phase("rates", Phase.SUSPENDED)
    until(lambda: not site.cluster.pods(site.namespace), "the trials have released their slots")
    site.client.patch(Job, "rates", {"spec": {"suspend": False}}, patch_type=PatchType.MERGE)
    until(lambda: len(site.cluster.pods(site.namespace)) == 2, "2 trials run again")
    site.client.delete(Job, "rates")
    until(lambda: not site.scheduler.jobs(), "the sweep and its trials are deleted")
    until(lambda: not site.objects(), "the cluster has nothing of them")


@pytest.mark.exhaustive
def test_a_sweep_submitted_over_rest_has_a_resource(site: Site) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "rates",
            "script": site.script("rates", "exit 0"),
            "image": IMAGE,
            "args": ["{lr}"],
            "sweep": {"grid": {"lr": [1, 2]}, "max_parallel": 1},
        }
    )
    site.scheduler.submit(spec)
    status = site.await_phase("rates", Phase.COMPLETE)
    assert status["sweep"]["complete"] == 2
    made = site.resource("rates")["spec"]["sweep"]
    assert (made["grid"], made["maxParallel"]) == ({"lr": [1, 2]}, 1)
    site.scheduler.control.delete("rates")
    until(lambda: site.resource("rates") is None, "the resource is deleted")


@pytest.mark.exhaustive
def test_created_before_the_job_that_it_waits_for(site: Site) -> None:
    """In whichever order resources come, as after one `kubectl apply` of several."""
    site.apply("a-last", "exit 0", after=[{"job": "rates"}], maxReplicas=1)
    status = site.await_phase("a-last", Phase.CREATED)
    assert (status["reason"], "rates" in status["message"]) == ("WaitsForJobs", True)
    goal = site.folder / "goal"
    fields = trials(site, f"while [ ! -e {goal} ]; do sleep 0.5; done")
    site.apply("rates", sweep={"list": [{"lr": 1}]}, **fields)
    status = site.await_phase("a-last", Phase.QUEUED)
    assert status["message"] == "The job waits for job rates to complete."
    goal.touch()
    site.await_phase("a-last", Phase.COMPLETE)
    site.apply("never", "exit 0", after=[{"job": "rates", "when": "failed"}])
    assert "can never start" in site.await_phase("never", Phase.FAILED)["message"]


@pytest.mark.exhaustive
def test_one_job_after_another(site: Site) -> None:
    """It has no pod until the other is complete; one that waits for a failure never starts."""
    goal = site.folder / "goal"
    site.apply("prepare", f"while [ ! -e {goal} ]; do sleep 0.5; done", maxReplicas=1)
    site.apply("train", f"test -e {goal}", after=[{"job": "prepare"}], maxReplicas=1)
    site.apply("repair", "exit 0", after=[{"job": "prepare", "when": "failed"}], maxReplicas=1)
    site.await_phase("prepare", Phase.RUNNING)
    status = site.await_phase("train", Phase.QUEUED)
    assert status["message"] == "The job waits for job prepare to complete."
    assert (status["attempt"], status["replicas"]) == (0, 0)
    assert set(site.cluster.pods(site.namespace)) == {"prepare-a1-r0"}
    goal.touch()
    assert site.await_phase("train", Phase.COMPLETE)["attempt"] == 1
    status = site.await_phase("repair", Phase.FAILED)
    assert (status["reason"], status["attempt"]) == ("DependencyNotMet", 0)
    for name in ("prepare", "train", "repair"):
        site.client.delete(Job, name)
    until(lambda: not site.scheduler.jobs() and not site.objects(), "nothing of them is left")


@pytest.mark.exhaustive
def test_resources_that_wait_in_a_circle_are_refused(site: Site) -> None:
    site.apply("alpha", "exit 0", after=[{"job": "beta"}])
    site.await_phase("alpha", Phase.CREATED)
    site.apply("beta", "exit 0", after=[{"job": "alpha", "when": "ended"}])
    for name in ("alpha", "beta"):
        message = site.await_phase(name, Phase.FAILED)["message"]
        assert "jobs that wait for each other in a circle never start" in message


def test_submitted_over_rest(site: Site) -> None:
    """A job that was submitted otherwise is given a resource; deleting that ends it, too."""
    spec = JobSpec(
        name="alpha",
        script=site.script("alpha", RUNS),
        image=IMAGE,
        max_replicas=2,
        environment={"MY_NAME": "x"},
    )
    site.scheduler.submit(spec)
    site.await_phase("alpha", Phase.RUNNING)
    made = site.resource("alpha")["spec"]
    assert made["script"] == spec.script
    assert made["maxReplicas"] == 2
    assert made["environment"] == {"MY_NAME": "x"}
    site.client.delete(Job, "alpha")
    until(lambda: "alpha" not in site.scheduler.jobs(), "the job is deleted")


def test_refused(site: Site) -> None:
    """What can never run is told by the resource itself, and nothing is submitted."""
    site.apply("alpha", RUNS, numStages=9)
    status = site.await_phase("alpha", Phase.FAILED)
    assert status["reason"] == "Refused"
    assert "9" in status["message"]
    assert true(status) == {"Failed"}
    assert "alpha" not in site.scheduler.jobs()


def test_template_and_its_image(site: Site) -> None:
    """The pods are made from the user's template; its container's image is the job's."""
    site.apply(
        "alpha",
        RUNS,
        image=None,
        template={
            "metadata": {"labels": {"team": "blue"}},
            "spec": {
                "containers": [
                    {"name": "other", "image": IMAGE, "command": ["sh", "-c", "exit 0"]},
                    {"name": "replica", "image": IMAGE, "env": [{"name": "MINE", "value": "1"}]},
                ]
            },
        },
    )
    site.await_phase("alpha", Phase.RUNNING)
    made = next(iter(site.cluster.pods(site.namespace, team="blue").values()))
    ours = next(c for c in made.spec.containers if c.name == "replica")
    assert [v.value for v in ours.env if v.name == "MINE"] == ["1"]
    assert ours.image == IMAGE


def test_what_happened_while_no_scheduler_ran(site: Site) -> None:
    """A resource that came, one that went, and one that changed are caught up with."""
    for name in ("goes", "stays"):
        site.apply(name, RUNS, maxReplicas=1)
        site.await_phase(name, Phase.RUNNING)
    site.scheduler.stop(grace=20.0)
    site.client.delete(Job, "goes")
    site.apply("comes", RUNS, maxReplicas=1)
    site.client.patch(Job, "stays", {"spec": {"suspend": True}}, patch_type=PatchType.MERGE)
    site.serve()
    site.await_phase("comes", Phase.RUNNING)
    site.await_phase("stays", Phase.SUSPENDED)
    until(lambda: set(site.scheduler.jobs()) == {"comes", "stays"}, "the job is deleted")
