"""True duration of an iteration of a pipeline job: a simulation of GPipe, stage by stage.

The layers' times are those of the job's profile, modified by effects that it does not contain:

    e     efficiency of a device for this model                      ±8 %, by job and device
    i_k   deviation of a stage from the sum of its layers            ±5 %, by job, device, K, k
    o     receiving and sending of each further stage                `HANDOVER` s per micro-batch
    d     remaining differences between runs                         ±3 %, by configuration

    f_k = e·i_k·(Σ forward of its layers) + o[k > 0]     g_k alike, with recomputation

`Schedule` simulates these with the boundary copies. Then a ring inside each node (r replicas on the
fullest) and one across the n nodes reduce stage k's gradients, 2 bytes per parameter:

    AR_k = 2·(r-1)/r·bytes/link + 2·(n-1)/n·bytes/network + latencies

Inside a node each stage has its own links; across nodes all stages share the node's network, last
stage first. The optimizer then reads and writes a stage's state once. Deviations are hashes of
their inputs and a seed, so that the truth is a function of the configuration.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel import Schedule, StagePlan
from pipollux_perfmodel.partitioning.memory import state_bytes
from pipollux_perfmodel.timing.gpipe import network_end

from .base import RunningJob, TrueStepTimes
from .devices import Device

HANDOVER = 1e-3
"""Seconds per micro-batch of each stage but the first, in forward and backward each."""
_EFFICIENCY, _IMBALANCE, _RUN_TO_RUN = 0.08, 0.05, 0.03


@dataclass(frozen=True)
class PipelineTruth:
    """True step times of one cut on one device."""

    name: str
    plan: StagePlan
    device: Device
    seed: int = 0
    deviates: bool = True
    """False: no deviations, as in tests against closed forms."""

    def schedule(self, micro_bsz: float, num_microbatches: int) -> Schedule:
        """Return the timeline of one forward and backward of M micro-batches of b samples."""
        profile, balance = self.plan.profile, self.plan.balance
        alpha, beta = (
            {
                phase: profile.by_stage(f"{phase}_{kind}", balance)
                for phase in ("forward", "backward")
            }
            for kind in ("alpha", "beta")
        )
        slow = self._slowness()
        handover = HANDOVER * (np.arange(len(balance)) > 0)
        forward = slow * (alpha["forward"] + beta["forward"] * micro_bsz) + handover
        kept = slow * (alpha["backward"] + beta["backward"] * micro_bsz) + handover
        recomputed = kept + forward - handover
        checkpoint = self.plan.perf_params.checkpoint
        link = self.device.link
        crossing = profile.boundary_bytes()[np.cumsum(balance)[:-1]] * micro_bsz
        return Schedule(
            "gpipe",
            tuple(forward.tolist()),
            tuple((kept if checkpoint == "never" else recomputed).tolist()),
            num_microbatches,
            last_backward=tuple((recomputed if checkpoint == "always" else kept).tolist()),
            transfer=tuple(link.seconds(num_bytes) for num_bytes in crossing.tolist()),
        )

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the true step times; ValueError if the sizes do not fit the devices' memory."""
        self._check(running)
        micro_bsz = running.atomic_bsz / running.num_microbatches
        final = self.schedule(micro_bsz, running.num_microbatches).final_times
        reduced = self._all_reduced(final, running)
        factor = 1 + _RUN_TO_RUN * self._deviation(
            "run", running.num_microbatches, running.atomic_bsz, *sorted(running.placement)
        )
        accum = max(final) * factor
        return TrueStepTimes((reduced + self._update_seconds()) * factor, accum)

    def all_reduces(self, placement: tuple[int, ...]) -> tuple[float, ...]:
        """Return AR_k, seconds to reduce the gradients of each stage, first stage first."""
        grads = self.plan.profile.by_stage("parameter_bytes", self.plan.balance).tolist()
        inside, across = max(placement), len(placement)
        link, network = self.device.link, self.device.network
        return tuple(
            2 * (inside - 1) * (link.latency + num_bytes / inside / link.bandwidth)
            + 2 * (across - 1) * (network.latency + num_bytes / across / network.bandwidth)
            for num_bytes in grads
        )

    def _all_reduced(self, final: tuple[float, ...], running: RunningJob) -> float:
        times = self.all_reduces(running.placement)
        return float(network_end(final, times, running.num_nodes > 1))

    def _update_seconds(self) -> float:
        per_layer = state_bytes(self.plan.profile)
        starts = np.cumsum((0, *self.plan.balance[:-1]))
        return float(2 * np.add.reduceat(per_layer, starts).max() / self.device.memory_bandwidth)

    def _slowness(self) -> NDArray[np.float64]:
        num_stages = len(self.plan.balance)
        whole = 1 + _EFFICIENCY * self._deviation("efficiency")
        stages = [self._deviation("stage", num_stages, k) for k in range(num_stages)]
        return whole * (1 + _IMBALANCE * np.array(stages))

    def _deviation(self, *what: object) -> float:
        """Return a number in [-1, 1], a hash of seed, application, device and `what`."""
        if not self.deviates:
            return 0.0
        cut = self.plan.balance if what[0] == "run" else ()
        key = repr((self.seed, self.name, self.device.name, cut, what)).encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**63 - 1

    def _check(self, running: RunningJob) -> None:
        for field in ("num_microbatches", "atomic_bsz"):
            if getattr(running, field) < 1:
                raise ValueError(f"{field}: {getattr(running, field)} must be at least 1")
        if not running.placement or min(running.placement) < 1:
            raise ValueError(
                f"placement: {running.placement} must have at least one replica on each node"
            )
        micro_bsz = running.atomic_bsz / running.num_microbatches
        needed = float(self.plan.memory(micro_bsz, running.num_microbatches).max())
        if needed > self.device.memory_limit * (1 + 1e-9):
            raise ValueError(
                f"atomic_bsz: {running.atomic_bsz} samples in {running.num_microbatches} "
                f"micro-batches need {needed:.4g} bytes in a stage, but {self.device.name} has "
                f"{self.device.memory_limit:.4g}; give more micro-batches or fewer samples"
            )
