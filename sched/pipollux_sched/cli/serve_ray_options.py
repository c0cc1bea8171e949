"""Options of `pipollux serve --backend ray`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from pipollux_sched.backend.ray.engine import RayOptions

from .option_group import text_option


@dataclass(frozen=True, kw_only=True)
class RayFlags:
    """The fields of `RayOptions` given on the command line; None if not given."""

    panel: ClassVar[str] = "With --backend ray"
    head: Annotated[
        str | None,
        text_option(
            "--address",
            "HOST:PORT",
            "Address of the Ray cluster's head.",
            "auto: RAY_ADDRESS, or the cluster that this machine is a node of",
        ),
    ] = None


def ray_options(backend: str, given: RayFlags) -> RayOptions | None:
    """Return the options of the Ray backend, None for others.

    `typer.BadParameter`: one is given for another backend.
    """
    if backend == "ray":
        return RayOptions(address=given.head or "auto")
    if given.head is not None:
        raise typer.BadParameter("needs --backend ray", param_hint="'--address'")
    return None
