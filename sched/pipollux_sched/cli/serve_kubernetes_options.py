"""Options of `pipollux serve --backend kubernetes`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from pipollux_sched.backend.kubernetes.options import KubernetesOptions

__all__ = [
    "CheckpointClaim",
    "CheckpointFolder",
    "CheckpointHostPath",
    "DeviceResource",
    "ImagePython",
    "Namespace",
    "NodeSelector",
    "SchedulerName",
    "Toleration",
    "TrainJobRuntime",
    "Via",
    "VolcanoQueue",
    "kubernetes_options",
]

_PANEL = "With --backend kubernetes"
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_TOLERATION = re.compile(r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>\w+))?")
_VIA = ("pod", "trainjob")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

Namespace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAME",
        help="Where jobs and their pods are.",
        show_default="that of the context, or of the scheduler's own pod",
        rich_help_panel=_PANEL,
    ),
]
SchedulerName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scheduler-name",
        metavar="NAME",
        help="Label of its pods; another for each scheduler of a namespace.",
        show_default="pipollux",
        rich_help_panel=_PANEL,
    ),
]
DeviceResource: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--device-resource",
        metavar="RESOURCE",
        help="The resource that a slot is one of; cpu for CPU devices.",
        show_default="nvidia.com/gpu",
        rich_help_panel=_PANEL,
    ),
]
NodeSelector: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--node-selector",
        metavar="LABEL=VALUE",
        help="Use only nodes with this label; may be repeated.",
        show_default="all nodes with devices",
        rich_help_panel=_PANEL,
    ),
]
Toleration: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--toleration",
        metavar="KEY[=VALUE][:EFFECT]",
        help="Use nodes with this taint, too; may be repeated.",
        show_default="only that of the device resource",
        rich_help_panel=_PANEL,
    ),
]
CheckpointFolder: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-folder",
        metavar="DIR",
        help="Where the volume for checkpoints is mounted in pods.",
        show_default="/checkpoints",
        rich_help_panel=_PANEL,
    ),
]
CheckpointClaim: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-claim",
        metavar="NAME",
        help="PersistentVolumeClaim for the checkpoints of all jobs.",
        show_default="none",
        rich_help_panel=_PANEL,
    ),
]
CheckpointHostPath: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-host-path",
        metavar="DIR",
        help="Folder that all nodes share, instead of a claim.",
        show_default="none",
        rich_help_panel=_PANEL,
    ),
]
Via: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--via",
        metavar="pod|trainjob",
        help="What a launch is made as: a pod for each replica, or one TrainJob.",
        show_default="pod",
        rich_help_panel=_PANEL,
    ),
]
TrainJobRuntime: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--trainjob-runtime",
        metavar="NAME",
        help="ClusterTrainingRuntime of TrainJobs.",
        show_default="torch-distributed",
        rich_help_panel=_PANEL,
    ),
]
VolcanoQueue: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--volcano-queue",
        metavar="NAME",
        help="Queue of TrainJobs whose runtime uses Volcano.",
        show_default="none",
        rich_help_panel=_PANEL,
    ),
]
ImagePython: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--image-python",
        metavar="COMMAND",
        help="The Python of images, with this package.",
        show_default="python",
        rich_help_panel=_PANEL,
    ),
]


def kubernetes_options(backend: str, given: Mapping[str, Any]) -> KubernetesOptions | None:
    """Return the options of the Kubernetes backend; None for another one.

    Args:
        backend: name of the backend.
        given: the fields of `KubernetesOptions` that the command line gives; None where it does
            not.

    Raises:
        typer.BadParameter: one is wrong, or they are given for another backend.
    """
    named = {name: value for name, value in given.items() if value}
    if backend != "kubernetes":
        if named:
            raise typer.BadParameter(
                "needs --backend kubernetes", param_hint=f"'{_flag(next(iter(named)))}'"
            )
        return None
    if named.get("via") not in (None, *_VIA):
        raise typer.BadParameter(
            f"{named['via']!r} is not {' or '.join(_VIA)}", param_hint="'--via'"
        )
    if named.get("via") != "trainjob":
        for name in ("runtime", "volcano_queue"):
            if name in named:
                raise typer.BadParameter("needs --via trainjob", param_hint=f"'{_flag(name)}'")
    if named.get("checkpoint_claim") and named.get("checkpoint_host_path"):
        raise typer.BadParameter(
            "cannot be given with --checkpoint-claim; choose one",
            param_hint="'--checkpoint-host-path'",
        )
    for name in ("checkpoint_folder", "checkpoint_host_path"):
        if name in named and not named[name].startswith("/"):
            raise typer.BadParameter(
                f"{named[name]!r} is relative; give a path that begins with '/'",
                param_hint=f"'{_flag(name)}'",
            )
    if "scheduler" in named and not _LABEL_VALUE.fullmatch(named["scheduler"]):
        raise typer.BadParameter(
            f"{named['scheduler']!r} is not the value of a label; use up to 63 letters, digits, "
            "'-', '_' and '.'",
            param_hint="'--scheduler-name'",
        )
    if "node_selector" in named:
        named["node_selector"] = _selector(named["node_selector"])
    if "tolerations" in named:
        named["tolerations"] = tuple(map(_toleration, named["tolerations"]))
    return KubernetesOptions(**named)


def _flag(field: str) -> str:
    flags = {
        "scheduler": "--scheduler-name",
        "device": "--device-resource",
        "tolerations": "--toleration",
        "python": "--image-python",
        "runtime": "--trainjob-runtime",
    }
    return flags.get(field, "--" + field.replace("_", "-"))


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
