"""The truth of simulated jobs that train a GPT-like model in a pipeline; an `Application`.

Times are from `PipelineTruth`, gradients from `GptModel.noise_scale`. An epoch is a twentieth of
the iterations. The `JobModel` is a parameter, so that models can be compared on the same truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from pipollux_perfmodel import GradParams

from .base import JobModel, RunningJob, TrueStepTimes
from .devices import A100_40G, Device
from .gpt import GPT_MODELS, GptModel
from .pipeline_job import MIN_SAMPLES, PipelineJob
from .pipeline_model import PipelineJobModel
from .pipeline_truth import PipelineTruth

NUM_EPOCHS = 20
_REQUESTED = (1, 2, 4, 8, 16)
_LEAST_SCALING, _MOST_SCALING = 0.5, 0.8
_SLOTS_PER_NODE, _MOST_SLOTS = 8, 32

ModelMaker: TypeAlias = Callable[[PipelineJob, int | None], JobModel]
"""Creates the model of a new job from its layers and the batch size fixed by its user, if any."""


class PipelineApplication:
    """Jobs that train one model of `GPT_MODELS`; ValueError if it fits on no device.

    The first of the devices is that of nodes without a type. `seed` is of all deviations from the
    layer profile; without `fixed_stages` jobs choose; `new_model` is `PipelineJobModel` or
    `SiaPipelineModel`.

    >>> application = PipelineApplication("gpt-13b")
    >>> [shape.num_stages for shape in application.new_model().shapes()]
    [8]
    """

    def __init__(
        self,
        model: str | GptModel,
        devices: Sequence[Device] = (A100_40G,),
        *,
        seed: int = 0,
        fixed_stages: int | None = None,
        new_model: ModelMaker = PipelineJobModel,
    ) -> None:
        self._model = _model(model) if isinstance(model, str) else model
        self.job = PipelineJob(self._model, tuple(devices), fixed_stages)
        self.name = self._model.name
        self.init_batch_size = self._model.init_batch_size
        self.max_batch_size = self._model.max_batch_size
        self.max_epochs = NUM_EPOCHS
        self._seed = seed
        self._make_model = new_model
        self._times: dict[RunningJob, TrueStepTimes] = {}
        self._configurations: tuple[tuple[int, int], ...] | None = None

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return the true step times; ValueError if the job cannot run in this configuration."""
        if running not in self._times:
            device = self.job.device(running.gpu_type)
            truth = PipelineTruth(self.name, self.job.way(running), device, self._seed)
            self._times[running] = truth.step_times(running)
        return self._times[running]

    def gradients(self, batch_size: int, epoch: int) -> GradParams:  # noqa: ARG002  # the protocol's: the noise scale is one of the model, whatever its batch
        """Return squared norm 1 and the variance at the initial batch size, midway in an epoch."""
        return _gradients(self._model, self.progress(epoch) + self.progress(1) / 2)

    def progress(self, epoch: int) -> float:
        """Return the progress at the end of `epoch` epochs, in iterations at the initial batch."""
        return self._model.iterations * epoch / NUM_EPOCHS

    def completion_epoch(self, batch_size: int) -> int:  # noqa: ARG002  # the protocol's: progress counts what a larger batch is worth
        """Return the last epoch."""
        return NUM_EPOCHS - 1

    def max_replicas(self, batch_size: int | None = None) -> int:
        """Return the maximum replicas that can share a batch; None: the largest batch."""
        most = self.job.max_replicas
        return most if batch_size is None else max(min(most, batch_size // MIN_SAMPLES), 1)

    def new_model(self, batch_size: int | None = None) -> JobModel:
        """Return the model of a new job, whose user may fix a batch size within bounds."""
        return self._make_model(self.job, batch_size)

    def requests(self, rng: np.random.Generator) -> tuple[int, int]:
        """Draw (num_replicas, batch_size) of an informed user, as in `JobArrival`."""
        if self._configurations is None:
            self._configurations = self.configurations()
        return self._configurations[int(rng.integers(len(self._configurations)))]

    def configurations(self) -> tuple[tuple[int, int], ...]:
        """Return (num_replicas, batch_size) pairs that scale, but not perfectly.

        On nodes of 8 GPUs and up to 32 in total. Each number of replicas has the batch size, a
        power of two times the initial one, with the shortest training by true times midway. As in
        the Pollux artifact, only numbers with 50 to 80 % of perfect scaling are included; without
        any, the largest number with more.
        """
        shape = PipelineJobModel(self.job).shapes()[0]
        scaling: dict[int, float] = {}
        batches: dict[int, int] = {}
        one_rate = 0.0
        for replicas in _REQUESTED:
            if replicas * shape.num_stages <= _MOST_SLOTS:
                rate, batches[replicas] = self._best_batch(replicas)
                one_rate = one_rate or rate
                scaling[replicas] = rate / one_rate / replicas
        chosen = [r for r in scaling if _LEAST_SCALING < scaling[r] < _MOST_SCALING]
        chosen = chosen or [max(r for r in scaling if scaling[r] > _LEAST_SCALING)]
        return tuple((replicas, batches[replicas]) for replicas in chosen)

    def _best_batch(self, num_replicas: int) -> tuple[float, int]:
        """Return (progress per second midway, batch size) of the best batch size."""
        rates = []
        batch_size = self.init_batch_size
        while batch_size < num_replicas * MIN_SAMPLES:
            batch_size *= 2
        while batch_size <= self.max_batch_size:
            rates.append((self._rate(num_replicas, batch_size), batch_size))
            batch_size *= 2
        return max(rates)

    def _rate(self, num_replicas: int, batch_size: int) -> float:
        model = PipelineJobModel(self.job, batch_size)
        shape = model.shapes()[0]
        full, rest = divmod(num_replicas, _SLOTS_PER_NODE // shape.num_stages)
        placement = (_SLOTS_PER_NODE // shape.num_stages,) * full + ((rest,) if rest else ())
        running = model.configure(shape, placement, shape.gpu_type or "")
        times = self.step_times(running)
        sqr, var = self.gradients(batch_size, NUM_EPOCHS // 2)
        gain = (var + sqr) / (var * self.init_batch_size / running.batch_size + sqr)
        return float(gain / (times.optim_step + running.accum_steps * times.accum_step))


@lru_cache(maxsize=1024)
def _gradients(model: GptModel, iteration: float) -> GradParams:
    return GradParams(1.0, model.noise_scale(iteration) / model.init_batch_size)


def _model(name: str) -> GptModel:
    if name not in GPT_MODELS:
        raise ValueError(f"model: {name!r} is not known; give one of {', '.join(GPT_MODELS)}")
    return GPT_MODELS[name]
