"""Options of `pipollux serve --backend slurm`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from pipollux_sched.backend.slurm.pools import Pools
from pipollux_sched.backend.slurm.rented_pools import PoolOptions, RentedPools
from pipollux_sched.store import StateDir

from .option_group import flag_of, text_option

_RANGE = re.compile(r"(?P<least>[1-9]\d*)(:(?P<most>[1-9]\d*))?")
_OURS = ("--job-name", "-J", "--nodes", "-N", "--array", "-a", "--wrap", "--requeue", "--parsable")
"""Options of sbatch that Pipollux sets itself."""


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """Options of the nodes to request from Slurm; None if not given."""

    panel: ClassVar[str] = "With --backend slurm"
    nodes: Annotated[
        str | None,
        text_option(
            "--nodes",
            "MIN[:MAX]",
            "Request nodes from Slurm: MIN, and up to MAX if jobs profit from them.",
            "the nodes of the allocation that the scheduler runs in",
        ),
    ] = None
    partition: Annotated[
        str | None, text_option("--partition", "NAME", "Partition of the nodes.", "Slurm's default")
    ] = None
    gres: Annotated[
        str | None,
        text_option(
            "--gres",
            "gpu:K",
            "GPUs that each node must have; a slot is a GPU.",
            "none: CPUs are slots",
        ),
    ] = None
    time: Annotated[
        str | None,
        text_option("--time", "TIME", "Time limit of a node; another one replaces it.", "Slurm's"),
    ] = None
    account: Annotated[
        str | None, text_option("--account", "NAME", "Account that nodes are charged to.", "yours")
    ] = None
    qos: Annotated[str | None, text_option("--qos", "NAME", "Quality of service.", "yours")] = None
    constraint: Annotated[
        str | None,
        text_option("--constraint", "FEATURES", "Features that nodes must have.", "none"),
    ] = None
    reservation: Annotated[
        str | None, text_option("--reservation", "NAME", "Reservation of the nodes.", "none")
    ] = None
    more: Annotated[
        list[str] | None,
        text_option(
            "--sbatch-option", "OPTION", "Additional option of sbatch; may be repeated.", "none"
        ),
    ] = None
    renew_before: Annotated[
        float | None,
        typer.Option(
            "--renew-before",
            min=1.0,
            metavar="SECONDS",
            help="Seconds before its time limit to leave a node; at most a quarter of the limit.",
            show_default="600",
        ),
    ] = None
    keep: Annotated[
        bool,
        typer.Option(
            "--keep-pool", help="Keep the nodes for the next scheduler when this one stops."
        ),
    ] = False


def slurm_pools(
    backend: str, state_dir: StateDir, given: SlurmFlags
) -> tuple[Pools | None, tuple[int, int] | None]:
    """Return the allocations that the Slurm backend uses, and the bounds of their number.

    None for another backend, and for the allocation that the scheduler runs in; the bounds are None
    if the number of nodes is fixed.

    Raises:
        typer.BadParameter: an option is invalid, or given for another backend or without --nodes.
    """
    named: dict[str, Any] = {name: value for name, value in vars(given).items() if value}
    nodes = named.pop("nodes", None)
    if backend != "slurm" or nodes is None:
        if named or nodes is not None:
            missing = "--nodes, too" if backend == "slurm" else "--backend slurm"
            first = "--nodes" if nodes is not None else flag_of(SlurmFlags, next(iter(named)))
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
    state_dir.create()
    name = f"pipollux-{state_dir.identity('slurm')}"
    options = PoolOptions(name=name, num_nodes=least, **named)
    return RentedPools(options), (least, most) if most > least else None


def _check_more(options: Sequence[str]) -> None:
    for option in options:
        if not option.startswith("-") or option.partition("=")[0] in _OURS:
            raise typer.BadParameter(
                f"{option!r} is not an option that may be added; give one of sbatch's in one word, "
                f"as in --sbatch-option=--exclude=n7, and none of {', '.join(_OURS)}",
                param_hint="'--sbatch-option'",
            )
