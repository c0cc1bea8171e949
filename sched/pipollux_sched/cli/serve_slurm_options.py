"""Options of `pipollux serve --backend slurm`."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from pipollux_sched.backend.slurm.pools import Pools
from pipollux_sched.backend.slurm.rented_pools import PoolOptions, RentedPools
from pipollux_sched.store import StateDir
from pipollux_sched.utils.atomic_write import PRIVATE, write_aside

__all__ = [
    "Account",
    "Constraint",
    "Gres",
    "KeepPool",
    "Nodes",
    "Partition",
    "Qos",
    "RenewBefore",
    "Reservation",
    "SbatchOption",
    "TimeLimit",
    "slurm_pools",
]

_PANEL = "With --backend slurm"
_RANGE = re.compile(r"(?P<least>[1-9]\d*)(:(?P<most>[1-9]\d*))?")
_IDENTITY = "slurm.id"
_OURS = ("--job-name", "-J", "--nodes", "-N", "--array", "-a", "--wrap", "--requeue", "--parsable")
"""Options of sbatch that are given already."""


def _text(flag: str, metavar: str, text: str, default: str) -> Any:
    return typer.Option(
        flag, metavar=metavar, help=text, show_default=default, rich_help_panel=_PANEL
    )


Nodes: TypeAlias = Annotated[
    str | None,
    _text(
        "--nodes",
        "MIN[:MAX]",
        "Ask Slurm for nodes: MIN of them, and up to MAX if they are worth it.",
        "those of the allocation that the scheduler is started in",
    ),
]
Partition: TypeAlias = Annotated[
    str | None, _text("--partition", "NAME", "Where to ask for nodes.", "Slurm's default")
]
Gres: TypeAlias = Annotated[
    str | None,
    _text(
        "--gres", "gpu:K", "GPUs that each node must have; a slot is a GPU.", "none: CPUs are slots"
    ),
]
TimeLimit: TypeAlias = Annotated[
    str | None,
    _text("--time", "TIME", "Time limit of a node, after which another is asked for.", "Slurm's"),
]
Account: TypeAlias = Annotated[
    str | None, _text("--account", "NAME", "Account that nodes are charged to.", "yours")
]
Qos: TypeAlias = Annotated[str | None, _text("--qos", "NAME", "Quality of service.", "yours")]
Constraint: TypeAlias = Annotated[
    str | None, _text("--constraint", "FEATURES", "Features that nodes must have.", "none")
]
Reservation: TypeAlias = Annotated[
    str | None, _text("--reservation", "NAME", "Reservation to take nodes from.", "none")
]
SbatchOption: TypeAlias = Annotated[
    list[str] | None,
    _text("--sbatch-option", "OPTION", "Further option of sbatch; may be repeated.", "none"),
]
RenewBefore: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--renew-before",
        min=1.0,
        metavar="SECONDS",
        help="Leave a node so long before its time limit; at most a quarter of it.",
        show_default="600",
        rich_help_panel=_PANEL,
    ),
]
KeepPool: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--keep-pool",
        help="Keep the nodes when the scheduler is stopped, for the next one.",
        rich_help_panel=_PANEL,
    ),
]


def slurm_pools(
    backend: str, state_dir: StateDir, nodes: str | None, given: Mapping[str, Any]
) -> tuple[Pools | None, tuple[int, int] | None]:
    """Return the allocations that the Slurm backend uses, and bounds for their number.

    Args:
        backend: name of the backend.
        state_dir: of the scheduler.
        nodes: MIN or MIN:MAX.
        given: the fields of `PoolOptions` that the command line gives; None where it does not.

    Returns:
        None for another backend, and for the allocation that the scheduler is in; the bounds are
        None where the number of nodes stays the same.

    Raises:
        typer.BadParameter: one is wrong, or they are given for another backend or without --nodes.
    """
    named = {name: value for name, value in given.items() if value}
    if backend != "slurm" or nodes is None:
        if named or nodes is not None:
            missing = "--nodes, too" if backend == "slurm" else "--backend slurm"
            first = "--nodes" if nodes is not None else _flag(next(iter(named)))
            raise typer.BadParameter(f"needs {missing}", param_hint=f"'{first}'")
        return None, None
    match = _RANGE.fullmatch(nodes)
    least, most = (int(match["least"]), int(match["most"] or match["least"])) if match else (1, 0)
    if least > most:
        raise typer.BadParameter(
            f"{nodes!r} is not MIN or MIN:MAX, whole numbers from 1 as in 2:16",
            param_hint="'--nodes'",
        )
    _check_more(named.get("more", ()))
    options = PoolOptions(name=f"pipollux-{_identity(state_dir)}", num_nodes=least, **named)
    return RentedPools(options), (least, most) if most > least else None


def _flag(field: str) -> str:
    flags = {"more": "--sbatch-option", "keep": "--keep-pool"}
    return flags.get(field, "--" + field.replace("_", "-"))


def _check_more(options: Sequence[str]) -> None:
    for option in options:
        if not option.startswith("-") or option.partition("=")[0] in _OURS:
            raise typer.BadParameter(
                f"{option!r} is not an option that may be added; give one of sbatch's in one word, "
                f"as in --sbatch-option=--exclude=n7, and none of {', '.join(_OURS)}",
                param_hint="'--sbatch-option'",
            )


def _identity(state_dir: StateDir) -> str:
    """Return what tells this scheduler's allocations from others; it lasts as long as its state."""
    state_dir.create()
    path = state_dir.path / _IDENTITY
    try:
        found = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        found = ""
    if not re.fullmatch(r"[0-9a-f]{8}", found):
        found = secrets.token_hex(4)
        write_aside(path, f"{found}\n".encode("ascii"), PRIVATE)
    return found
