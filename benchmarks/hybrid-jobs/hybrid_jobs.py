"""Pipeline jobs with a free choice of stages, against fixed stages and Sia's model.

    OPENBLAS_NUM_THREADS=1 python benchmarks/hybrid-jobs/hybrid_jobs.py \
        [--seed 0] [--jobs 80] [--hours 24] [--clusters one,two] [--only NAME,…] \
        [--interval 60] [--scarcity 0.7] [--tail 0] [--rank-power 0.5] [--processes 1]

GPT-like models of 1.3 to 13 billion parameters arrive as in the Philly trace. All contenders have
the same jobs, which train by `PipelineTruth`; they differ in the policy, the jobs' models and their
choices:

    K with R       `ExactPolicy`, every K that fits
    fixed K        `ExactPolicy`, one K per model and type of GPU: the least that fits; the best on
                   8 and on 32 GPUs by true step times and noise midway; 8
    Sia            `SiaPolicy` and Sia's model: its fixed K, 48 samples per replica
    Sia's model    `ExactPolicy` with Sia's model
    Sia's policy   `SiaPolicy` with every K that fits

`--scarcity`, `--tail` and `--rank-power` are those of `CompletionTime`, for all rows of
`ExactPolicy`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipollux_policies import CompletionTime, ExactPolicy, NodeInfo, ReplicaShape, SiaPolicy
from pipollux_simulator import (
    A100_40G,
    DEVICES,
    GPT_MODELS,
    V100_16G,
    Device,
    PipelineApplication,
    PipelineJob,
    PipelineJobModel,
    SiaPipelineModel,
    generate,
)
from pipollux_simulator.applications.pipeline import NUM_EPOCHS
from pipollux_simulator.applications.pipeline_job import STAGE_COUNTS
from pipollux_simulator.engine.cluster import Cluster, Options, Result

GPUS = 8  # of a node
CLUSTERS: dict[str, dict[str, Device]] = {
    "one": {f"a{n}": A100_40G for n in range(8)},
    "two": {f"a{n}": A100_40G for n in range(5)} | {f"v{n}": V100_16G for n in range(6)},
}


Stages = Mapping[tuple[str, str], int]
"""By model and type of GPU, the only K."""


@dataclass(frozen=True)
class Contender:
    """A combination of policy, job model and stages."""

    name: str
    stages: Stages | None = None
    """None: every K that fits."""
    sia_model: bool = False
    sia_policy: bool = False

    def application(self, model: str, devices: tuple[Device, ...]) -> PipelineApplication:
        """Return a model's jobs with this contender's knowledge; they train the same everywhere."""
        if self.sia_model:
            return PipelineApplication(model, devices, new_model=SiaPipelineModel)
        if self.stages is None:
            return PipelineApplication(model, devices)
        kept = {device.name: self.stages.get((model, device.name)) for device in devices}
        return PipelineApplication(model, devices, new_model=partial(FixedModel, kept))


class FixedModel(PipelineJobModel):
    """A job that has one K for each type of GPU."""

    def __init__(
        self, kept: Mapping[str, int | None], job: PipelineJob, batch_size: int | None
    ) -> None:
        super().__init__(job, batch_size)
        self._kept = kept

    def shapes(self) -> tuple[ReplicaShape, ...]:
        """Return one shape per type of GPU."""
        any_type = next(iter(self._kept))
        shapes = super().shapes()
        return tuple(s for s in shapes if self._kept[s.gpu_type or any_type] == s.num_stages)


@dataclass(frozen=True)
class Outcome:
    """The result of a contender."""

    name: str
    row: str
    stages: str
    """GPU-hours by model and K."""


def main() -> None:
    """Simulate all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=80)
    parser.add_argument("--hours", type=float, default=24.0, help="in which jobs arrive")
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--only", default="", help="contenders whose names begin so, by commas")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between decisions")
    usual = CompletionTime()
    parser.add_argument("--scarcity", type=float, default=usual.scarcity)
    parser.add_argument("--tail", type=float, default=usual.tail)
    parser.add_argument("--rank-power", type=float, default=usual.rank_power)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in ("scarcity", "tail", "rank_power")}
    objective = CompletionTime(**chosen)
    with ProcessPoolExecutor(options.processes) as pool:
        for name in options.clusters.split(","):
            devices = devices_of(name)
            size = (options.jobs, options.hours)
            arguments = (name, options.seed, *size, options.interval, objective)
            begins = tuple(options.only.split(","))
            taking_part = [who for who in contenders(devices) if who.name.startswith(begins)]
            runs = [pool.submit(simulate, who, *arguments) for who in taking_part]
            nodes = Counter(device.name for device in CLUSTERS[name].values())
            print(
                f"\nNodes of {GPUS} GPUs: {dict(nodes)}; {options.jobs} jobs, "
                f"seed {options.seed}, every {options.interval:g} s, "
                + ", ".join(f"{key} {_said(value)}" for key, value in chosen.items())
                + "\n"
            )
            print(
                "| | average JCT | median | p99 | makespan | restarts per job | GPUs held "
                "| samples per GPU-second | policy per round |"
            )
            print("|---" * 9 + "|")
            outcomes = []
            for run in runs:
                outcomes.append(run.result())
                print(outcomes[-1].row, flush=True)
            for outcome in outcomes:
                print(f"{outcome.name}: {outcome.stages}", flush=True)


def _said(value: float | None) -> str:
    return "as usual" if value is None else f"{value:g}"


def devices_of(cluster: str) -> tuple[Device, ...]:
    """Return the types of GPU of a cluster, in the order of all."""
    return tuple(device for device in DEVICES if device in CLUSTERS[cluster].values())


def contenders(devices: tuple[Device, ...]) -> list[Contender]:
    """Return the contenders; of equal fixed choices, the first."""
    fits = {
        (name, device.name): [*_rates(name, device, GPUS)]
        for name in GPT_MODELS
        for device in devices
    }
    choices: dict[str, Stages] = {"least K": {key: ks[0] for key, ks in fits.items() if ks}}
    for gpus in (8, 32):
        choices[f"K best on {gpus} GPUs"] = {
            (name, device.name): max(rates, key=rates.__getitem__)
            for name in GPT_MODELS
            for device in devices
            if (rates := _rates(name, device, gpus))
        }
    choices["K = 8"] = {key: ks[-1] for key, ks in fits.items() if ks}
    found = [Contender("K with R")]
    for label, stages in choices.items():
        if all(stages != other.stages for other in found):
            found.append(Contender(label, stages))
    return [
        *found,
        Contender("Sia", sia_model=True, sia_policy=True),
        Contender("Sia's model", sia_model=True),
        Contender("Sia's policy", sia_policy=True),
    ]


def _rates(name: str, device: Device, gpus: int) -> dict[int, float]:
    """Return the true progress per second midway by every K that fits, at the best batch size."""
    model, rates = GPT_MODELS[name], {}
    for stages in STAGE_COUNTS:
        try:
            app = PipelineApplication(model, (device,), fixed_stages=stages)
        except ValueError:  # it does not fit
            continue
        batch_sizes = [model.init_batch_size]
        while 2 * batch_sizes[-1] <= model.max_batch_size:
            batch_sizes.append(2 * batch_sizes[-1])
        rates[stages] = max(_rate(app, stages, gpus, batch_size) for batch_size in batch_sizes)
    return rates


def _rate(app: PipelineApplication, stages: int, gpus: int, batch_size: int) -> float:
    learnt = PipelineJobModel(app.job, batch_size)
    placement = (GPUS // stages,) * (gpus // GPUS)
    try:
        running = learnt.configure(learnt.shapes()[0], placement)
    except ValueError:  # too many replicas for the batch
        return 0.0
    optim, accum = app.step_times(running)
    sqr, var = app.gradients(running.batch_size, NUM_EPOCHS // 2)
    gain = (var + sqr) / (var * app.init_batch_size / running.batch_size + sqr)
    return gain / (optim + running.accum_steps * accum)


def simulate(
    who: Contender,
    cluster: str,
    seed: int,
    num_jobs: int,
    hours: float,
    interval: float,
    objective: CompletionTime,
) -> Outcome:
    """Simulate all jobs under one contender."""
    devices = devices_of(cluster)
    requests = {name: PipelineApplication(name, devices).requests for name in GPT_MODELS}
    workload = generate(num_jobs, hours, seed, "pipelines", requests)
    nodes = {
        name: NodeInfo({"slots": GPUS}, gpu_type=device.name)
        for name, device in CLUSTERS[cluster].items()
    }
    policy = SiaPolicy() if who.sia_policy else ExactPolicy(objective)
    applications = {name: who.application(name, devices) for name in GPT_MODELS}
    result = Cluster(workload, applications, nodes, policy, Options(interval=interval)).run()
    return Outcome(who.name, _row(who, result), _stages(result))


def _row(who: Contender, result: Result) -> str:
    times = np.array([job.completed - job.arrival.time for job in result.jobs]) / 3600
    held = sum(job.attained_service for job in result.jobs)
    share = held / (GPUS * len(result.nodes) * result.makespan)
    trained = sum(
        GPT_MODELS[job.arrival.application].iterations * job.app.init_batch_size
        for job in result.jobs
    )
    restarts = np.mean([job.num_restarts for job in result.jobs])
    low, middle, high = times.mean(), np.median(times), np.quantile(times, 0.99)
    return (
        f"| {who.name} | {low:.2f} h | {middle:.2f} h | {high:.1f} h "
        f"| {result.makespan / 3600:.1f} h | {restarts:.1f} | {100 * share:.0f} % "
        f"| {trained / held:.3f} | {1e3 * np.mean(result.policy_seconds):.0f} ms |"
    )


def _stages(result: Result) -> str:
    """Return GPU-hours by model, type of GPU and K."""
    hours: dict[tuple[str, str], Counter[int]] = {}
    for job in result.jobs:
        for part in job.history:
            kind = result.nodes[part.nodes[0]].gpu_type
            counts = hours.setdefault((job.arrival.application, kind), Counter())
            counts[part.num_stages] += (
                (part.end - part.start) / 3600 * len(part.nodes) * part.num_stages
            )
    return "; ".join(
        f"{name} on {kind}: " + ", ".join(f"K = {k} {counts[k]:.0f}" for k in sorted(counts))
        for (name, kind), counts in sorted(hours.items())
    )


if __name__ == "__main__":
    main()
