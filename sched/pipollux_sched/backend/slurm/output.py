"""Parsers for the output of Slurm's commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

JOB_FORMAT = "%i|%T|%L|%l|%N|%r|%j"
"""Format of `squeue` for `read_jobs`; the field that may contain anything is last."""
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
    """Seconds to its time limit; None: no limit, or not running."""
    limit: float | None
    """Time limit in seconds; None: no limit."""
    nodes: str
    """Its nodes as a Slurm host list: `n[1-3]`."""
    reason: str
    """Why it waits, or has ended; empty if Slurm gives no reason."""
    name: str


class StepLine(NamedTuple):
    """A step, as `squeue -s` lists it."""

    step: str
    """Id, such as 12.3."""
    job: int
    """The allocation that it runs in."""
    node: str
    name: str


class NodeLine(NamedTuple):
    """A node, from `scontrol show node`."""

    name: str
    flags: frozenset[str]
    """Its state and the flags on it: `{"ALLOCATED", "DRAIN"}`."""
    reason: str
    """The reason of its state, by an admin or Slurm."""
    memory: int
    """In bytes."""
    cpus: int


class Share(NamedTuple):
    """An allocation's share of each of some nodes."""

    nodes: str
    """The nodes as a Slurm host list."""
    cpus: int
    memory: int
    """In bytes; 0: Slurm does not count memory."""
    gpus: int
    gpu_type: str | None


def read_jobs(text: str) -> dict[int, SlurmJob]:
    """Parse the output of `squeue -h -o JOB_FORMAT`; job arrays and the like are left out.

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
                # Past its limit, and not ended yet.
                seconds_left=0.0 if left == "INVALID" else seconds(left),
                limit=seconds(limit),
                nodes=nodes,
                reason="" if reason in ("None", "(null)") else reason,
                name=name,
            )
    return found


def read_steps(text: str) -> list[StepLine]:
    r"""Parse the output of `squeue -h -s -o STEP_FORMAT`; batch scripts and the like are left out.

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
    """Parse the output of `scontrol show node -o`."""
    nodes = [_node(assignments(line)) for line in text.splitlines() if "NodeName=" in line]
    return {node.name: node for node in nodes}


def _node(fields: dict[str, str]) -> NodeLine:
    state = fields.get("State", "UNKNOWN")
    # A trailing character marks a transition: * for a node that does not answer.
    flags = {flag.rstrip("*~#!%$@^-") for flag in state.split("+")}
    if "*" in state:
        flags.add("NOT_RESPONDING")
    return NodeLine(
        name=fields["NodeName"],
        flags=frozenset(flags),
        # Users do not need who set it, and when.
        reason=re.sub(r" \[[^\[\]]*@[^\[\]]*\]$", "", fields.get("Reason", "")),
        memory=int(fields.get("RealMemory", "0")) * 2**20,
        cpus=int(fields.get("CPUTot", "0")),
    )


def split_jobs(text: str) -> dict[int, str]:
    r"""Return the line of each job in the output of `scontrol show job -o`.

    A number that occurs twice is left out: users' texts in a job may contain line breaks.

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
    """Parse a running allocation's share of its nodes from `scontrol show job -d -o`.

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
    """Return the length of a list of ranges.

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
    """Return a Slurm time in seconds; None: no limit.

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
