"""Pods satisfy Pod Security `restricted`, and no template of a job gets more than is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.core_v1 import Pod, Secret
from lightkube.types import PatchType

from pipollux_sched.backend import Launch, ReplicaProgram
from pipollux_sched.backend.kubernetes.api import Job
from pipollux_sched.backend.kubernetes.options import KubernetesOptions, PodSecurity
from pipollux_sched.backend.kubernetes.pod_security import template_problems
from pipollux_sched.backend.kubernetes.pods import Owner, make_pod
from pipollux_sched.backend.kubernetes.trainjobs import make_trainjob
from pipollux_sched.lifecycle import Phase
from tests.sched.backends import assignments

from .cluster import IMAGE, until
from .engines import RUNS
from .memory.cluster import MemoryCluster
from .requests import documents
from .test_resources import Site

PATH = "spec.containers[0].securityContext"
BASELINE: dict[str, dict[str, Any]] = {
    "spec.hostNetwork": {"hostNetwork": True},
    "spec.hostPID": {"hostPID": True},
    "spec.hostIPC": {"hostIPC": True},
    "spec.volumes[0].hostPath": {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]},
    "spec.serviceAccountName": {"serviceAccountName": "admin"},
    "spec.priorityClassName": {"priorityClassName": "system-node-critical"},
    "spec.securityContext.sysctls[0].name": {
        "securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}
    },
    "spec.securityContext.seccompProfile.type": {
        "securityContext": {"seccompProfile": {"type": "Unconfined"}}
    },
    "spec.securityContext.seLinuxOptions.type": {
        "securityContext": {"seLinuxOptions": {"type": "spc_t"}}
    },
    "spec.securityContext.windowsOptions.hostProcess": {
        "securityContext": {"windowsOptions": {"hostProcess": True}}
    },
    "spec.containers[0].ports[0].hostPort": {"ports": [{"containerPort": 80, "hostPort": 80}]},
    "spec.containers[0].livenessProbe.httpGet.host": {
        "livenessProbe": {"httpGet": {"host": "169.254.169.254", "port": 80}}
    },
    "spec.containers[0].lifecycle.preStop.tcpSocket.host": {
        "lifecycle": {"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 80}}}
    },
    f"{PATH}.privileged": {"securityContext": {"privileged": True}},
    f"{PATH}.procMount": {"securityContext": {"procMount": "Unmasked"}},
    f"{PATH}.capabilities.add": {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
    f"{PATH}.appArmorProfile.type": {
        "securityContext": {"appArmorProfile": {"type": "Unconfined"}}
    },
    f"{PATH}.seLinuxOptions.user": {"securityContext": {"seLinuxOptions": {"user": "system_u"}}},
}
"""What `baseline` forbids, too, by its path: fields of the pod, or of its first container."""
RESTRICTED: dict[str, dict[str, Any]] = {
    "spec.volumes[0].nfs": {"volumes": [{"name": "home", "nfs": {"server": "a", "path": "/"}}]},
    "spec.securityContext.runAsUser": {"securityContext": {"runAsUser": 0}},
    "spec.securityContext.runAsNonRoot": {"securityContext": {"runAsNonRoot": False}},
    f"{PATH}.runAsUser": {"securityContext": {"runAsUser": 0}},
    f"{PATH}.allowPrivilegeEscalation": {"securityContext": {"allowPrivilegeEscalation": True}},
    f"{PATH}.capabilities.add": {"securityContext": {"capabilities": {"add": ["CHOWN"]}}},
    f"{PATH}.capabilities.drop": {"securityContext": {"capabilities": {"drop": ["KILL"]}}},
}
"""What only `restricted` forbids."""


def template_of(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "replica", "image": IMAGE}
    if path.startswith("spec.containers"):
        return {"spec": {"containers": [{**container, **fields}]}}
    return {"spec": {"containers": [container], **fields}}


def problems(template: Any, level: PodSecurity, **options: Any) -> dict[str, str]:
    allowed = KubernetesOptions(pod_security=level, **options)
    return {found.path: found.text for found in template_problems(template, allowed)}


PROGRAM = ReplicaProgram(job="job", script=Path("/a.py"), image=IMAGE, num_stages=1)
LAUNCH = Launch(
    job="job",
    attempt=1,
    assignments=assignments(["n1"]),
    num_first=1,
    scheduler_url="http://127.0.0.1:1",
    checkpoints="/checkpoints",
)


def test_the_limit_of_memory_is_that_of_the_container() -> None:
    options = KubernetesOptions(checkpoint_claim="checkpoints")
    for program, requests in (
        (replace(PROGRAM, memory_limit=2**30), "0"),
        (replace(PROGRAM, memory_limit=2**30, memory=2**29), str(2**29)),
    ):
        pod = make_pod(program, LAUNCH, 0, Owner("job", "1"), options)
        found = pod["spec"]["containers"][0]["resources"]
        assert found["limits"]["memory"] == str(2**30)
        assert found["requests"]["memory"] == requests


def pod_of(template: Mapping[str, Any], level: PodSecurity = "restricted") -> Any:
    """Return the spec of the pod that a job's template becomes."""
    options = KubernetesOptions(pod_security=level, checkpoint_claim="checkpoints")
    return make_pod(PROGRAM, LAUNCH, 0, Owner("job", "1", template), options)["spec"]


def assert_restricted(spec: Any) -> None:
    """Check what the standard demands of every pod, field by field."""
    context = spec["securityContext"]
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        own = container["securityContext"]
        assert own.get("runAsNonRoot", context.get("runAsNonRoot")) is True
        profile = own.get("seccompProfile", context.get("seccompProfile"))
        assert profile["type"] in ("RuntimeDefault", "Localhost")
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        assert not own.get("privileged")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    kinds = {kind for volume in spec["volumes"] for kind in volume} - {"name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret", "configMap", "projected"}


def test_a_pod_is_restricted_whether_its_template_says_so_or_not() -> None:
    assert_restricted(pod_of({}))
    assert_restricted(
        pod_of(
            {
                "spec": {
                    "securityContext": {"runAsUser": 10001, "fsGroup": 10001},
                    "initContainers": [{"name": "fetch", "image": IMAGE}],
                    "containers": [
                        {"name": "log", "image": IMAGE},
                        {"name": "replica", "securityContext": {"readOnlyRootFilesystem": True}},
                    ],
                    "volumes": [{"name": "data", "secret": {"secretName": "mine"}}],
                }
            }
        )
    )


def test_the_pods_of_a_trainjob_are_restricted() -> None:
    options = KubernetesOptions(checkpoint_claim="checkpoints")
    (patch,) = make_trainjob(PROGRAM, LAUNCH, Owner("job", "1"), options)["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert_restricted(job["template"]["spec"]["template"]["spec"])


def test_what_a_template_says_stays() -> None:
    spec = pod_of(
        {
            "spec": {
                "securityContext": {"runAsUser": 7, "seccompProfile": {"type": "Localhost"}},
                "containers": [
                    {"securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}}}
                ],
            }
        }
    )
    assert spec["securityContext"] == {
        "runAsUser": 7,
        "seccompProfile": {"type": "Localhost"},
        "runAsNonRoot": True,
    }
    capabilities = spec["containers"][0]["securityContext"]["capabilities"]
    assert capabilities == {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}
    assert "securityContext" not in pod_of({}, "baseline")


def test_what_is_forbidden_is_refused_by_its_path() -> None:
    for path, fields in BASELINE.items():
        template = template_of(path, fields)
        for level in ("restricted", "baseline"):
            assert list(problems(template, level)) == [path]
        assert problems(template, "privileged") == {}
    for path, fields in RESTRICTED.items():
        template = template_of(path, fields)
        assert list(problems(template, "restricted")) == [path]
        assert problems(template, "baseline") == {}


def test_the_priority_class_of_pods() -> None:
    """The administrator's, where a template names none."""
    options = KubernetesOptions(priority_class="training", checkpoint_claim="checkpoints")
    for template, name in (({}, "training"), ({"spec": {"priorityClassName": "mine"}}, "mine")):
        pod = make_pod(PROGRAM, LAUNCH, 0, Owner("job", "1", template), options)
        assert pod["spec"]["priorityClassName"] == name
    assert "priorityClassName" not in pod_of({})


def test_annotations_of_apparmor() -> None:
    key = "container.apparmor.security.beta.kubernetes.io/replica"
    for profile, refused in (("unconfined", 1), ("runtime/default", 0), ("localhost/mine", 0)):
        template = {"metadata": {"annotations": {key: profile}}}
        assert len(problems(template, "restricted")) == refused


def test_allowed_service_accounts() -> None:
    template = {"spec": {"serviceAccountName": "reader"}}
    (text,) = problems(template, "restricted").values()
    assert text.startswith("'reader' is not allowed; allowed are: default.")
    assert problems(template, "restricted", service_accounts=("reader",)) == {}
    assert problems({"spec": {"serviceAccountName": "default"}}, "restricted") == {}


def test_the_token_of_another_job_is_refused_at_every_level() -> None:
    name = "pipollux-token-alpha-0123456789"
    for spec in (
        {"containers": [{"envFrom": [{"secretRef": {"name": name}}]}]},
        {"containers": [{"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": name}}}]}]},
        {"volumes": [{"name": "a", "secret": {"secretName": name}}]},
        {"volumes": [{"name": "a", "projected": {"sources": [{"secret": {"name": name}}]}}]},
    ):
        (text,) = problems({"spec": spec}, "privileged").values()
        assert text == f"'{name}' holds the token of a job; the scheduler alone uses it"


def test_what_is_no_template_is_refused() -> None:
    for template in (
        [],
        {"spec": "containers"},
        {"metadata": ["a"]},
        {"spec": {"containers": "replica"}},
        {"spec": {"containers": ["replica"]}},
        {"spec": {"containers": [{"env": {"A": "1"}}]}},
        {"spec": {"containers": [{"volumeMounts": 1}]}},
        {"spec": {"containers": [{"resources": "all"}]}},
        {"spec": {"volumes": {"a": 1}}},
        {"spec": {"securityContext": True}},
    ):
        assert problems(template, "privileged") != {}
    assert problems({}, "restricted") == {}


def test_the_example_and_the_scheduler_itself_are_restricted() -> None:
    (example,) = documents("example-job.yaml")
    assert problems(example["spec"]["template"], "restricted") == {}
    assert_restricted(pod_of(example["spec"]["template"]))
    (deployment,) = [d for d in documents("scheduler.yaml") if d["kind"] == "Deployment"]
    assert_restricted(deployment["spec"]["template"]["spec"])


HOSTILE = {
    "spec": {
        "containers": [{"name": "replica", "image": IMAGE, "securityContext": {"privileged": True}}]
    }
}


def test_a_job_with_such_a_template(
    memory: MemoryCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, with its reason in the status; later on, it gets no further pod."""
    monkeypatch.setenv("KUBECONFIG", str(memory.kubeconfig))
    site = Site(memory, "default", tmp_path / "site")
    volumes = [{"name": "root", "hostPath": {"path": "/"}}]
    site.apply("alpha", RUNS, template={"spec": {"volumes": volumes}})
    status = site.await_phase("alpha", Phase.FAILED)
    assert status["reason"] == "Refused"
    assert status["message"] == (
        "job 'alpha': template: spec.volumes[0].hostPath: is not allowed; use another volume, as "
        "this scheduler runs with --pod-security restricted"
    )
    assert site.cluster.pods("default") == {}
    site.apply("beta", RUNS, maxReplicas=1, maxRestarts=0)
    site.await_phase("beta", Phase.RUNNING)
    (secret,) = [s for s in site.client.list(Secret) if s.metadata.name.startswith("pipollux-")]
    patch = {"spec": {"template": HOSTILE}}
    site.client.patch(Job, "beta", patch, patch_type=PatchType.MERGE)

    def told() -> Any:
        conditions = site.status("beta").get("conditions") or ()
        return [c["message"] for c in conditions if c["type"] == "TemplateRefused"]

    (message,) = until(told, "its status tells of it")
    assert "securityContext.privileged: must be false" in message
    site.client.patch(Job, "beta", {"spec": {"suspend": True}}, patch_type=PatchType.MERGE)
    site.await_phase("beta", Phase.SUSPENDED)
    site.client.patch(Job, "beta", {"spec": {"suspend": False}}, patch_type=PatchType.MERGE)
    assert "securityContext.privileged" in site.await_phase("beta", Phase.FAILED)["message"]
    assert not [pod for pod in site.client.list(Pod) if pod.metadata.name.startswith("beta-a2")]
    assert told() == []
    site.client.delete(Job, "beta")
    gone = secret.metadata.name
    until(
        lambda: gone not in {s.metadata.name for s in site.client.list(Secret)},
        "the cluster collects the token with the resource",
    )
    site.close()
