"""GPipe's closed forms: the end of the forwards, and when each stage's gradients are final.

GPipe (Huang et al., NeurIPS'19) runs M micro-batches forward through K stages, then back in the
opposite order. Each way is a flow shop of identical jobs, so its length is known exactly:

    f_k, g_k   forward and backward of one micro-batch in stage k (with recomputation)
    l_k        the same backward for the last micro-batch, the first to come back; l_k = g_k, but
               g_k - f_k under `except_last`, which recomputes all but that one
    t_k        copy from stage k to k + 1, and of its gradient back
    v, u       the machines that gradients pass from stage K - 1 to stage i: g and t; for the last
               micro-batch l and t

    T_f        = Σf + Σt + (M - 1)·max(f, t)
    fin_i      = T_f + Σv + (M - 1)·max v                                       l = g
    fin_i      = T_f + max_p [Σ_{j≤p} u_j + Σ_{j≥p} v_j + (M - 2)·max_{j≥p} v_j]   else, M > 1
    fin_i      = T_f + Σu                                                       else, M = 1
    T_pipe     = fin_0

A copy that overlaps with compute is a separate machine, as written. Otherwise it occupies the
receiving device: f_k + t_{k-1} and g_k + t_k replace f_k and g_k. If stages run one at a time (one
CPU thread drives all), T_pipe is the sum of all times.

The all-reduce of stage i, AR_i, begins when its gradients are final. Over separate links the last
one ends at max_i(fin_i + AR_i); over one link, last stage first, at C_0 of C_i = max(C_{i+1},
fin_i) + AR_i, C_K = 0.

Times are floats or arrays that broadcast. `tests/perfmodel/simulator.py` simulates the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# A float for scalar arguments, else an array of the broadcast shape.
Numbers: TypeAlias = Any


class StageTimes(NamedTuple):
    """Seconds of one micro-batch, by stage (first axis)."""

    forward: Sequence[Numbers]
    """f_k, K entries."""
    backward: Sequence[Numbers]
    """g_k, K entries, recomputation included."""
    last_backward: Sequence[Numbers]
    """l_k, K entries; equal to `backward` unless the last micro-batch is not recomputed."""
    transfer: Sequence[Numbers]
    """t_k between stages k and k + 1, in both directions, K - 1 entries."""


def forward_span(times: StageTimes, num_microbatches: Numbers, overlapping: bool) -> Any:
    """Return T_f, when the last micro-batch has left the last stage."""
    machines = list(times.forward)
    if overlapping:
        machines += list(times.transfer)
    else:
        machines[1:] = [f + t for f, t in zip(machines[1:], times.transfer, strict=True)]
    return _total(machines) + (num_microbatches - 1) * _largest(machines)


def final_times(
    times: StageTimes, num_microbatches: Numbers, overlapping: bool
) -> tuple[Numbers, ...]:
    """Return fin_i of every stage, K entries; fin_0 is T_pipe."""
    start = forward_span(times, num_microbatches, overlapping)
    usual, last, ends = _backward_machines(times, overlapping)
    alike = times.last_backward is times.backward
    final = []
    for end in reversed(ends):
        if alike:
            spent = _total(usual[:end]) + (num_microbatches - 1) * _largest(usual[:end])
        else:
            spent = _one_job_differs(usual[:end], last[:end], num_microbatches)
        final.append(start + spent)
    return tuple(final)


def serial_final_times(times: StageTimes, num_microbatches: Numbers) -> tuple[Numbers, ...]:
    """Return when every stage's gradients are final if stages run one at a time, K entries."""
    copies = _total(times.transfer) if len(times.transfer) else 0.0
    usual = _total(times.forward) + _total(times.backward) + 2 * copies
    last = _total(times.forward) + _total(times.last_backward) + 2 * copies
    end = (num_microbatches - 1) * usual + last
    # Stages below i still have to run the backward of the first micro-batch.
    one = num_microbatches == 1
    final = [end]
    for stage in range(len(times.forward) - 1):
        left = np.where(one, times.last_backward[stage], times.backward[stage])
        end = end - left - (times.transfer[stage] if len(times.transfer) else 0.0)
        final.append(end)
    return tuple(final)


def network_end(
    final: Sequence[Numbers], all_reduce: Sequence[Numbers], shared_link: bool
) -> Numbers:
    """Return when the last all-reduce ends; `final` is fin_i, `all_reduce` AR_i, K entries each."""
    if not shared_link:
        return _largest([f + a for f, a in zip(final, all_reduce, strict=True)])
    end = 0.0
    for ready, seconds in zip(reversed(final), reversed(all_reduce), strict=True):
        end = np.maximum(end, ready) + seconds
    return end


def _backward_machines(
    times: StageTimes, overlapping: bool
) -> tuple[list[Numbers], list[Numbers], list[int]]:
    """Return v and u from stage K - 1 to 0, and how many of them end with stage K - 1, …, 0."""
    num_stages = len(times.backward)
    usual: list[Numbers] = []
    last: list[Numbers] = []
    ends = []
    for stage in reversed(range(num_stages)):
        arriving = 0.0
        if stage < num_stages - 1 and len(times.transfer):
            if overlapping:
                usual.append(times.transfer[stage])
                last.append(times.transfer[stage])
            else:
                arriving = times.transfer[stage]
        usual.append(times.backward[stage] + arriving)
        last.append(times.last_backward[stage] + arriving)
        ends.append(len(usual))
    return usual, last, ends


def _one_job_differs(
    usual: Sequence[Numbers], first: Sequence[Numbers], num_jobs: Numbers
) -> Numbers:
    """Return the length of a flow shop whose first job has different times. The longest path leaves
    the first job at some machine p.
    """
    alone = _total(first)
    if len(usual) == 1:
        return alone + (num_jobs - 1) * usual[0]
    paths = []
    for p in range(len(usual)):
        rest = _total(usual[p:]) + (num_jobs - 2) * _largest(usual[p:])
        paths.append(_total(first[: p + 1]) + rest)
    return np.where(num_jobs == 1, alone, _largest(paths))


def _total(values: Sequence[Numbers]) -> Numbers:
    return reduce(lambda a, b: a + b, values)


def _largest(values: Sequence[Numbers]) -> Numbers:
    return reduce(np.maximum, values)
