"""Hints: the state that a running job reports to the scheduler.

The JSON extends AdaptDL's (camelCase keys, `gradParams` as {norm, var}, `perfParams` as its seven
numbers), which is accepted unchanged. Additional keys are `numStages`, `numMicrobatches` and
`version`; in `perfParams` the parameters of a pipeline (`codec`); and, only if known, `layers`,
`balance`, `memoryLimit`, `shardedOptimizer`, `remainingSamples`, `trainedSamples`, `stepProfile`
(`step_rows`) and `stepRatios`. All other keys are errors: silently dropping a hint would silently
misjudge the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel

from pipollux_perfmodel.errors import InputError
from pipollux_perfmodel.goodput.corrections import MAX_RATIOS, StepCorrections, StepRatio
from pipollux_perfmodel.goodput.goodput import GoodputFunction
from pipollux_perfmodel.goodput.speedup import SpeedupFunction
from pipollux_perfmodel.partitioning.layer_profile import check_balance
from pipollux_perfmodel.timing.params import MAX_LEVELS, check_params, even_shares
from pipollux_perfmodel.timing.step_time import SyncCost, sync_cost

from .codec import (
    STRICT_KEYS,
    GradParamsField,
    GradParamsObject,
    LayersField,
    PerfParamsField,
    PerfParamsObject,
    describe,
)
from .step_rows import StepRow, StepRows


class HintsError(InputError):
    """Invalid hints; one sentence with key, value and remedy."""


def _zero_is_unknown(value: Any) -> Any:
    """Return None for 0: AdaptDL writes 0 for an unknown size."""
    return None if value == 0 and not isinstance(value, bool) else value


_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0)]
_ONLY_KNOWN = (
    "layers",
    "balance",
    "memory_limit",
    "remaining_samples",
    "trained_samples",
    "step_profile",
    "step_ratios",
)
_Ratio = Annotated[float, Field(ge=0.1, le=10.0)]
_Level = Annotated[int, Field(ge=1, le=MAX_LEVELS)]
_StepRatio = tuple[_Count, _Count, _Ratio] | tuple[_Count, _Count, _Ratio, _Level]
_UnknownCount = Annotated[_Count | None, BeforeValidator(_zero_is_unknown)]


class SchedHints(BaseModel):
    """Hints of one job: snake_case in Python, camelCase in JSON.

    Example:
        >>> hints = SchedHints.from_json_object({"initBatchSize": 32, "numStages": 2})
        >>> hints.num_stages, hints.to_json_object()["initBatchSize"]
        (2, 32)
    """

    model_config = ConfigDict(
        **STRICT_KEYS, alias_generator=to_camel, populate_by_name=True, frozen=True
    )

    init_batch_size: _UnknownCount = None
    """Batch size that the user chose for one replica; None (in JSON also 0): unknown."""
    local_bsz_bounds: tuple[_Count | None, _Count | None] | None = None
    """Minimum and maximum atomic batch size; None: unbounded."""
    global_batch_size: _UnknownCount = None
    """Current batch size of the job."""
    max_batch_size: _UnknownCount = None
    """Maximum batch size; None: the initial batch size."""
    max_profiled_replicas: Annotated[int, Field(ge=0)] = 0
    """Largest number of replicas with measured step times."""
    gradient_accumulation: bool = False
    """Whether the job may take accumulation steps."""
    grad_params: GradParamsField | None = None
    """Size and noise of the gradient; None: not measured yet."""
    perf_params: PerfParamsField | None = None
    """Step time parameters; None: not fitted yet."""
    num_stages: _Count = 1
    """K, the stages of one pipeline replica."""
    num_microbatches: _Count = 1
    """M, the micro-batches of one forward and backward."""
    layers: LayersField | None = None
    """Costs of the layers, in the JSON format of `LayerProfile`, from which `stage_speedups`
    predicts other numbers of stages. None: not measured."""
    balance: tuple[_Count, ...] | None = None
    """Current number of layers of each stage; None: the best cut of `layers`."""
    memory_limit: _Positive | None = None
    """Bytes available to a stage on its device; None: unbounded or unknown."""
    sharded_optimizer: bool = False
    """Whether replicas shard the optimizer's state of each stage."""
    remaining_samples: Annotated[float, Field(ge=0)] | None = None
    """Samples left to train, in units of samples at the initial batch size; None: unknown."""
    trained_samples: Annotated[float, Field(ge=0)] | None = None
    """Trained samples in the same unit, including those before restarts; None: unknown."""
    step_profile: StepRows | None = None
    """Step times for related jobs to start with; None: no step times."""
    step_ratios: Annotated[tuple[_StepRatio, ...], Field(max_length=MAX_RATIOS)] | None = None
    """Residuals of `perf_params` on measured steps, as `[nodes, replicas, measured time over
    predicted]`, with the network level as a fourth number from level 2 on; None: no residuals."""
    version: Literal[1] = 1
    """Version of this format."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_sizes()
        self._check_ratios()
        self._check_layers()
        self._settle_stages()
        return self

    def _check_sizes(self) -> None:
        low, high = self.local_bsz_bounds or (None, None)
        if low is not None and high is not None and low > high:
            raise ValueError(f"localBszBounds is [{low}, {high}]; give the smaller one first")
        init, largest = self.init_batch_size, self.max_batch_size
        if init is not None and largest is not None and largest < init:
            raise ValueError(
                f"maxBatchSize {largest} is below initBatchSize {init}; give at least {init}"
            )

    def _check_ratios(self) -> None:
        for nodes, replicas, *_ in self.step_ratios or ():
            if nodes > replicas:
                raise ValueError(
                    f"stepRatios: {nodes} nodes are more than {replicas} replicas; a replica lies "
                    "on one node"
                )

    def _check_layers(self) -> None:
        if self.balance is None:
            return
        if self.layers is None:
            raise ValueError(f"balance is {list(self.balance)} but layers is missing; give both")
        if len(self.balance) != self.num_stages:
            raise ValueError(
                f"balance {list(self.balance)} has {len(self.balance)} entries but numStages is "
                f"{self.num_stages}; give the number of layers of each stage"
            )
        check_balance(self.balance, self.layers.num_layers)

    @model_serializer(mode="wrap")
    def _leave_out_unknown(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit neutral fields that earlier readers do not know."""
        written: dict[str, Any] = write(self)
        unknown = [name for name in _ONLY_KNOWN if getattr(self, name) is None]
        if not self.sharded_optimizer:
            unknown.append("sharded_optimizer")
        for name in unknown:
            written.pop(name, None)
            written.pop(to_camel(name), None)
        return written

    def _settle_stages(self) -> None:
        """Fill in omitted shares, and reject shares of a different number of stages."""
        params = self.perf_params
        if params is None or params.num_stages == self.num_stages:
            return
        if params.num_stages:
            raise ValueError(
                f"perfParams.forward_shares has {params.num_stages} entries but numStages is "
                f"{self.num_stages}; give one share per stage"
            )
        forward, backward = even_shares(self.num_stages)
        settled = params._replace(forward_shares=forward, backward_shares=backward)
        object.__setattr__(self, "perf_params", check_params(settled))

    @classmethod
    def from_json_object(cls, value: Mapping[str, Any]) -> SchedHints:
        """Read hints from decoded JSON (or YAML). Raises HintsError with the first wrong key, its
        value and the allowed values.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise HintsError(describe(error, "hints", _known)) from None

    def to_json_object(self) -> dict[str, Any]:
        """Return the hints as a dict for `json.dumps`, keys in camelCase."""
        return self.model_dump(mode="json", by_alias=True)

    def goodput_function(self) -> GoodputFunction | None:
        """Return the job's goodput; None until its sizes, step times and gradients are known."""
        if self.perf_params is None or self.grad_params is None or self.init_batch_size is None:
            return None
        return GoodputFunction(self.perf_params, self.grad_params, self.init_batch_size)

    def sync_cost(self, num_nodes: int, num_replicas: int, level: int = 1) -> SyncCost | None:
        """Return what pushes and pulls cost, across a level of the network; None if step times are
        not known, or replicas average gradients in every step.
        """
        if self.perf_params is None or self.init_batch_size is None:
            return None
        params = self.perf_params.at_level(level)
        sizes = num_nodes, num_replicas, self.init_batch_size, 0, self.num_microbatches
        return sync_cost(params, *sizes)

    @property
    def corrections(self) -> StepCorrections | None:
        """Residuals of the step time parameters on measured steps; None: no residuals."""
        if not self.step_ratios:
            return None
        return StepCorrections(StepRatio(*entry) for entry in self.step_ratios)

    def speedup_function(self) -> SpeedupFunction | None:
        """Return the job's speedup; None until its goodput is known."""
        goodput_fn = self.goodput_function()
        if goodput_fn is None:
            return None
        return SpeedupFunction(
            goodput_fn,
            max_batch_size=self.max_batch_size,
            atomic_bsz_range=self.local_bsz_bounds,
            accumulation=self.gradient_accumulation,
            num_microbatches=self.num_microbatches,
            corrections=self.corrections,
        )


def _known(path: list[str]) -> list[str]:
    if path == ["perfParams"]:
        return list(PerfParamsObject.model_fields)
    if path == ["gradParams"]:
        return list(GradParamsObject.model_fields)
    if path[:1] == ["stepProfile"]:
        model = StepRows if len(path) == 1 else StepRow
        return [to_camel(field) for field in model.model_fields]
    return [to_camel(field) for field in SchedHints.model_fields]
