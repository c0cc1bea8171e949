"""Options of `pipollux serve --backend kubernetes`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import typer

from pipollux_perfmodel.timing.params import MAX_LEVELS
from pipollux_sched.backend.kubernetes.options import KubernetesOptions, PodSecurity

from .option_group import flag_of, text_option

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_TOLERATION = re.compile(r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>\w+))?")
_VIA = ("pod", "trainjob")
_LEVELS = get_args(PodSecurity)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class KubernetesFlags:
    """The fields of `KubernetesOptions` given on the command line; None if not given."""

    panel: ClassVar[str] = "With --backend kubernetes"
    namespace: Annotated[
        str | None,
        text_option(
            "--namespace",
            "NAME",
            "Namespace of jobs and their pods.",
            "that of the context, or of the scheduler's own pod",
        ),
    ] = None
    scheduler: Annotated[
        str | None,
        text_option(
            "--scheduler-name",
            "NAME",
            "Label of the scheduler's pods, unique within a namespace.",
            "pipollux",
        ),
    ] = None
    device: Annotated[
        str | None,
        text_option(
            "--device-resource",
            "RESOURCE",
            "Resource that a slot stands for; cpu for CPU devices.",
            "nvidia.com/gpu",
        ),
    ] = None
    node_selector: Annotated[
        list[str] | None,
        text_option(
            "--node-selector",
            "LABEL=VALUE",
            "Use only nodes with this label; may be repeated.",
            "all nodes with devices",
        ),
    ] = None
    topology_labels: Annotated[
        list[str] | None,
        text_option(
            "--topology-label",
            "LABEL",
            "Node label with a domain of the network, such as the zone, block or rack; may be "
            "repeated, from the widest level to the narrowest.",
            "topology.kubernetes.io/zone",
        ),
    ] = None
    tolerations: Annotated[
        list[str] | None,
        text_option(
            "--toleration",
            "KEY[=VALUE][:EFFECT]",
            "Also use nodes with this taint; may be repeated.",
            "only the taint of the device resource",
        ),
    ] = None
    checkpoint_folder: Annotated[
        str | None,
        text_option(
            "--checkpoint-folder",
            "DIR",
            "Mount path of the checkpoint volume in pods.",
            "/checkpoints",
        ),
    ] = None
    checkpoint_claim: Annotated[
        str | None,
        text_option(
            "--checkpoint-claim",
            "NAME",
            "PersistentVolumeClaim for the checkpoints of all jobs.",
            "none",
        ),
    ] = None
    checkpoint_host_path: Annotated[
        str | None,
        text_option(
            "--checkpoint-host-path",
            "DIR",
            "Folder that all nodes share, as the alternative to a claim.",
            "none",
        ),
    ] = None
    python: Annotated[
        str | None, text_option("--image-python", "COMMAND", "Python command of images.", "python")
    ] = None
    pod_security: Annotated[
        str | None,
        text_option(
            "--pod-security",
            "LEVEL",
            "Pod Security Standard that the pod templates of jobs must meet: restricted, baseline "
            "or privileged.",
            "restricted",
        ),
    ] = None
    service_accounts: Annotated[
        list[str] | None,
        text_option(
            "--allow-service-account",
            "NAME",
            "Service account that pod templates may use; may be repeated.",
            "only the namespace's default account",
        ),
    ] = None
    priority_class: Annotated[
        str | None,
        text_option(
            "--priority-class",
            "NAME",
            "PriorityClass of pods whose template sets none.",
            "the cluster's default",
        ),
    ] = None
    via: Annotated[
        str | None,
        text_option(
            "--via",
            "pod|trainjob",
            "Objects to create for a launch: a pod per replica, or one TrainJob.",
            "pod",
        ),
    ] = None
    runtime: Annotated[
        str | None,
        text_option(
            "--trainjob-runtime",
            "NAME",
            "ClusterTrainingRuntime of TrainJobs.",
            "torch-distributed",
        ),
    ] = None
    volcano_queue: Annotated[
        str | None, text_option("--volcano-queue", "NAME", "Volcano queue of TrainJobs.", "none")
    ] = None


def kubernetes_options(backend: str, given: KubernetesFlags) -> KubernetesOptions | None:
    """Return the options of the Kubernetes backend, if chosen; `BadParameter`: one is invalid."""
    named: dict[str, Any] = {name: value for name, value in vars(given).items() if value}
    if backend != "kubernetes":
        if named:
            raise typer.BadParameter(
                "needs --backend kubernetes",
                param_hint=f"'{flag_of(KubernetesFlags, next(iter(named)))}'",
            )
        return None
    if named.get("via") not in (None, *_VIA):
        raise typer.BadParameter(
            f"{named['via']!r} is not {' or '.join(_VIA)}", param_hint="'--via'"
        )
    if named.get("pod_security") not in (None, *_LEVELS):
        raise typer.BadParameter(
            f"{named['pod_security']!r} is not {', '.join(_LEVELS[:-1])} or {_LEVELS[-1]}",
            param_hint="'--pod-security'",
        )
    if named.get("via") != "trainjob":
        for name in ("runtime", "volcano_queue"):
            if name in named:
                raise typer.BadParameter(
                    "needs --via trainjob", param_hint=f"'{flag_of(KubernetesFlags, name)}'"
                )
    if named.get("checkpoint_claim") and named.get("checkpoint_host_path"):
        raise typer.BadParameter(
            "cannot be given with --checkpoint-claim; choose one",
            param_hint="'--checkpoint-host-path'",
        )
    for name in ("checkpoint_folder", "checkpoint_host_path"):
        if name in named and not named[name].startswith("/"):
            raise typer.BadParameter(
                f"{named[name]!r} is relative; give a path that begins with '/'",
                param_hint=f"'{flag_of(KubernetesFlags, name)}'",
            )
    if "scheduler" in named and not _LABEL_VALUE.fullmatch(named["scheduler"]):
        raise typer.BadParameter(
            f"{named['scheduler']!r} is not the value of a label; use up to 63 letters, digits, "
            "'-', '_' and '.'",
            param_hint="'--scheduler-name'",
        )
    if "node_selector" in named:
        named["node_selector"] = _selector(named["node_selector"])
    if "service_accounts" in named:
        named["service_accounts"] = tuple(named["service_accounts"])
    if "topology_labels" in named:
        named["topology_labels"] = _topology(named["topology_labels"])
    if "tolerations" in named:
        named["tolerations"] = tuple(map(_toleration, named["tolerations"]))
    return KubernetesOptions(**named)


def _selector(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        label, equals, value = text.partition("=")
        if not (label and equals):
            raise typer.BadParameter(
                f"{text!r} is not LABEL=VALUE, as in pool=training", param_hint="'--node-selector'"
            )
        found[label] = value
    return found


def _topology(labels: Sequence[str]) -> tuple[str, ...]:
    wrong = next((label for label in labels if not label or "=" in label), None)
    if wrong is not None or len(set(labels)) < len(labels) or len(labels) >= MAX_LEVELS:
        raise typer.BadParameter(
            f"{' '.join(labels)!r} must be keys of labels, each once and at most {MAX_LEVELS - 1}, "
            "such as topology.kubernetes.io/zone",
            param_hint="'--topology-label'",
        )
    return tuple(labels)


def _toleration(text: str) -> dict[str, str]:
    match = _TOLERATION.fullmatch(text)
    if match is None or match["effect"] not in (None, *_EFFECTS):
        raise typer.BadParameter(
            f"{text!r} is not KEY[=VALUE][:EFFECT], as in dedicated=training:NoSchedule; an effect "
            f"is {', '.join(_EFFECTS[:-1])} or {_EFFECTS[-1]}",
            param_hint="'--toleration'",
        )
    found = {"key": match["key"], "operator": "Exists" if match["value"] is None else "Equal"}
    if match["value"] is not None:
        found["value"] = match["value"]
    return found | ({"effect": match["effect"]} if match["effect"] else {})
