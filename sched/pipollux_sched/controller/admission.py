"""Admission of jobs and tokens, and the program of a job's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipollux_policies import NodeInfo
from pipollux_protocol.environment import TOKEN, trial_variables
from pipollux_sched.allocator.job_infos import job_info
from pipollux_sched.allocator.reasons import misfit
from pipollux_sched.backend import ReplicaProgram
from pipollux_sched.backend.run_as import own_name, why_no_python, why_not_as
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.script import with_script_found
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.spec.tokens import NewToken, Role
from pipollux_sched.store import JobRecord
from pipollux_utils.paths import expanded

from .program_check import check_program

_ON_MACHINES = ("local", "ray", "slurm")
"""Backends whose replicas are processes of a machine; others run containers."""
_WITHOUT_USERS = {
    "kubernetes": "whose pods run as their image says",
    "ray": "whose jobs run as the user who runs Ray",
}
"""Backends that cannot run jobs as other users, and why."""


def admitted(spec: JobSpec, nodes: Mapping[str, NodeInfo]) -> JobSpec:
    """Return a job with its script and folder resolved; with an image, neither exists here.

    `SpecError`: the job can never run here: script or folder missing, or no node fits it.
    """
    # Without any node the job waits for nodes to come.
    info = job_info(spec, spec.hints, age=0.0, nodes=nodes)
    reason = misfit(spec.name, info, nodes) if nodes else None
    if reason:
        raise SpecError(reason)
    if spec.image is not None:
        return spec
    spec = with_script_found(spec)
    folder = Path(spec.working_dir) if spec.working_dir else Path.cwd()
    if not folder.is_dir():
        raise SpecError(f"job '{spec.name}': working_dir: {folder} is not a folder")
    found = {"working_dir": str(folder.absolute())}
    if spec.checkpoint_dir is not None:
        checkpoints = expanded(spec.checkpoint_dir)
        if str(checkpoints).startswith("~"):  # a new folder of this name is not what was meant
            raise SpecError(
                f"job '{spec.name}': checkpoint_dir: there is no user {checkpoints.parts[0][1:]!r} "
                f"for {checkpoints}; give the path without '~'"
            )
        found["checkpoint_dir"] = str((folder / checkpoints).absolute())
    resolved = spec.model_copy(update=found)
    check_program(resolved)
    return resolved


def check_team(spec: JobSpec, teams: TeamsSpec | None) -> None:
    """Raise `SpecError` if `TeamsSpec.check` refuses a job, or it has a team and there are none."""
    if teams is not None:
        teams.check(spec)
        return
    for name in ("team", "priority"):
        value = getattr(spec, name)
        if value is not None:
            raise SpecError(
                f"job '{spec.name}': {name}: '{value}' is not known, as no teams are set; leave it "
                "out, or set teams with: pipollux teams --set FILE"
            )


def program(job: JobRecord, environment: Mapping[str, str]) -> ReplicaProgram:
    """Return the program of a job's replicas; `environment` overrides the user's variables."""
    spec = parse_job(job.spec)
    of_trial: Mapping[str, str] = {}
    if job.sweep is not None and job.trial is not None:
        of_trial = trial_variables(job.sweep, job.trial, job.parameters or {})
    return ReplicaProgram(
        job=job.name,
        script=Path(spec.script) if spec.script else None,
        module=spec.module,
        command=spec.command,
        python=spec.python,
        image=spec.image,
        args=tuple(spec.args),
        num_stages=spec.num_stages,
        process_per_stage=spec.process_per_stage,
        servers=spec.servers,
        environment={**spec.environment, **environment, **TOKEN.write(job.token), **of_trial},
        directory=Path(spec.working_dir) if spec.working_dir else None,
        checkpoints=Path(spec.checkpoint_dir) if spec.checkpoint_dir else None,
        run_as=spec.run_as,
        first_attempt=job.state.first_attempt,
        cpus=spec.resources.cpus,
        memory=spec.resources.memory,
        cpus_per_stage=spec.resources_per_stage.cpus,
        memory_per_stage=spec.resources_per_stage.memory,
        memory_limit=spec.memory_limit,
        sweep=job.sweep,
    )


def check_run_as(token: NewToken, backend: str) -> str:
    """Return a warning about a token holder's rights; `SpecError`: no job can run as `run_as`."""
    if token.run_as is not None:
        if backend in _WITHOUT_USERS:
            raise SpecError(
                f"run_as: '{token.run_as}' is of no use with the {backend} backend, "
                f"{_WITHOUT_USERS[backend]}; leave it out"
            )
        reason = why_not_as(token.run_as) or why_no_python(token.run_as)
        if reason is not None:
            raise SpecError(f"run_as: {reason}")
    if token.role is not Role.USER or backend not in _ON_MACHINES:
        return ""
    if token.run_as not in (None, own_name()):
        return ""
    if backend in _WITHOUT_USERS:
        remedy = f"the {backend} backend runs all jobs as one user"
    elif os.geteuid() == 0:
        remedy = "to run them as another user of the machine, pass --run-as"
    else:
        remedy = "only a scheduler that runs as root can run them as another user (--run-as)"
    return (
        f"jobs of '{token.name}' run as '{own_name()}', as the scheduler does, and can read and "
        f"change all that it can, its tokens too: '{token.name}' must be trusted as an admin is; "
        f"{remedy}"
    )
