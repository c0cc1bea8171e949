"""What Slurm's commands print, read into records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

JOB_FORMAT = "%i|%T|%L|%l|%N|%r|%j"
"""Format of `squeue` for `read_jobs`; what may contain anything comes last."""
STEP_FORMAT = "%i|%N|%j"
"""Format of `squeue -s` for `read_steps`."""
_ASSIGNMENT = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=")
_ALLOCATED = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)")
_GPU = re.compile(r"\bgpu(?::([^:(,]+?))?:(\d+)(?=\(|,|$)")
_JOB = re.compile(r"JobId=(\d+)\b")
_STEP = re.compile(r"(\d+)\.(\d+)")


class SlurmJob(NamedTuple):
    """An allocation, as `squeue` lists it."""

    job: int
    state: str
    """RUNNING, PENDING, COMPLETING, CANCELLED, PREEMPTED, TIMEOUT, NODE_FAIL …"""
    seconds_left: float | None
    """Seconds to its time limit; None: it has none, or does not run."""
    limit: float | None
    """Seconds of its time limit; None: it has none."""
    nodes: str
    """Its nodes, as Slurm writes a list of hosts: `n[1-3]`."""
    reason: str
    """Why it waits, or has ended; empty if Slurm gives no reason."""
    name: str


class StepLine(NamedTuple):
    """A step, as `squeue -s` lists it."""

    step: str
    """Such as 12.3."""
    job: int
    """The allocation that it runs in."""
    node: str
    name: str


class NodeLine(NamedTuple):
    """A node, as `scontrol show node` has it."""

    name: str
    flags: frozenset[str]
    """Its state and the flags on it: `{"ALLOCATED", "DRAIN"}`."""
    reason: str
    """What the admin, or Slurm, gave as the reason of its state."""
    memory: int
    """Bytes."""
    cpus: int


class Share(NamedTuple):
    """What an allocation holds of each of some nodes."""

    nodes: str
    """The nodes, as Slurm writes a list of hosts."""
    cpus: int
    memory: int
    """Bytes; 0: Slurm does not count memory."""
    gpus: int
    gpu_type: str | None


def read_jobs(text: str) -> dict[int, SlurmJob]:
    """Read what `squeue -h -o JOB_FORMAT` printed; arrays and the like are left out.

    Example:
        >>> read_jobs("7|RUNNING|1-00:00:10|2-00:00:00|n[1-3]|None|train")[7].seconds_left
        86410.0
    """
    found = {}
    for line in text.splitlines():
        fields = line.split("|", 6)
        if len(fields) == 7 and fields[0].isdecimal():
            number, state, left, limit, nodes, reason, name = fields
            found[int(number)] = SlurmJob(
                job=int(number),
                state=state,
                # Past its limit, and not yet ended: the difference is below zero.
                seconds_left=0.0 if left == "INVALID" else seconds(left),
                limit=seconds(limit),
                nodes=nodes,
                reason="" if reason in ("None", "(null)") else reason,
                name=name,
            )
    return found


def read_steps(text: str) -> list[StepLine]:
    r"""Read what `squeue -h -s -o STEP_FORMAT` printed; batch scripts and the like are left out.

    Example:
        >>> read_steps("7.0|n1|digits.a1.r0\n7.batch|n1|batch")
        [StepLine(step='7.0', job=7, node='n1', name='digits.a1.r0')]
    """
    found = []
    for line in text.splitlines():
        fields = line.split("|", 2)
        match = _STEP.fullmatch(fields[0])
        if len(fields) == 3 and match:
            found.append(StepLine(fields[0], int(match[1]), fields[1], fields[2]))
    return found


def read_nodes(text: str) -> dict[str, NodeLine]:
    """Read what `scontrol show node -o` printed."""
    nodes = [_node(assignments(line)) for line in text.splitlines() if "NodeName=" in line]
    return {node.name: node for node in nodes}


def _node(fields: dict[str, str]) -> NodeLine:
    state = fields.get("State", "UNKNOWN")
    # A state ends in a character for what is under way: * for a node that does not answer.
    flags = {flag.rstrip("*~#!%$@^-") for flag in state.split("+")}
    if "*" in state:
        flags.add("NOT_RESPONDING")
    return NodeLine(
        name=fields["NodeName"],
        flags=frozenset(flags),
        # Who set it, and when, is of no use to users.
        reason=re.sub(r" \[[^\[\]]*@[^\[\]]*\]$", "", fields.get("Reason", "")),
        memory=int(fields.get("RealMemory", "0")) * 2**20,
        cpus=int(fields.get("CPUTot", "0")),
    )


def split_jobs(text: str) -> dict[int, str]:
    r"""Return the line of each job that `scontrol show job -o` printed.

    A number that comes twice is left out: what users write into a job may have line breaks.

    Example:
        >>> split_jobs("JobId=7 JobName=a\nJobId=8 Comment=x\nJobId=7 Nodes=n1")
        {8: 'JobId=8 Comment=x'}
    """
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        if match := _JOB.match(line):
            found.setdefault(int(match[1]), []).append(line)
    return {number: lines[0] for number, lines in found.items() if len(lines) == 1}


def read_shares(text: str) -> list[Share]:
    """Read from `scontrol show job -d -o` what a running allocation holds of its nodes.

    Example:
        >>> read_shares("JobId=1 Nodes=n[1-2] CPU_IDs=0-3,8 Mem=512 GRES=gpu:a100:2(IDX:0-1) X=1")
        [Share(nodes='n[1-2]', cpus=5, memory=536870912, gpus=2, gpu_type='a100')]
    """
    shares = []
    for nodes, cpus, memory, gres in _ALLOCATED.findall(text):
        gpus = _GPU.findall(gres)
        types = {kind for kind, _ in gpus if kind}
        shares.append(
            Share(
                nodes=nodes,
                cpus=count_ids(cpus),
                memory=int(memory) * 2**20,
                gpus=sum(int(number) for _, number in gpus),
                gpu_type=types.pop() if len(types) == 1 else None,
            )
        )
    return shares


def assignments(line: str) -> dict[str, str]:
    """Split a line of NAME=VALUE pairs whose values may contain spaces.

    Example:
        >>> assignments("State=IDLE+DRAIN Reason=fan is broken")
        {'State': 'IDLE+DRAIN', 'Reason': 'fan is broken'}
    """
    parts = _ASSIGNMENT.split(line)
    return {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def count_ids(ids: str) -> int:
    """Return how many numbers a list of ranges has.

    Example:
        >>> count_ids("0-3,8")
        5
    """
    total = 0
    for part in filter(None, ids.split(",")):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def seconds(text: str) -> float | None:
    """Return the seconds in one of Slurm's times; None for one without a limit.

    Example:
        >>> seconds("1-00:01:10"), seconds("9:55"), seconds("UNLIMITED")
        (86470.0, 595.0, None)
    """
    days, dash, clock = text.rpartition("-")
    parts: Sequence[str] = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()):
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return float(total + (int(days) * 86400 if dash else 0))
