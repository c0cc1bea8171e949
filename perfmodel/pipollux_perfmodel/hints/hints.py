"""Hints: what a running job reports to the scheduler about itself.

The JSON is AdaptDL's (camelCase keys, `gradParams` as {norm, var}, `perfParams` as its seven
numbers), accepted as it is, with more keys: `numStages`, `numMicrobatches`, `version`; in
`perfParams` the numbers of a pipeline (`codec`); and, written only where they are known, `layers`,
`balance`, `memoryLimit`, `shardedOptimizer`, `remainingSamples`, `trainedSamples`, `stepProfile`
(`step_rows`) and `stepRatios`. Whatever else is in it is refused by name: a hint that is silently
dropped is a job that is silently misjudged.
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
from pipollux_perfmodel.timing.params import check_params, even_shares

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
    """Invalid hints; the text is one sentence that names key, value and remedy."""


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
_StepRatio = tuple[_Count, _Count, Annotated[float, Field(ge=0.1, le=10.0)]]
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
    """Batch size that the user chose for one replica; None (in JSON also 0): not known yet."""
    local_bsz_bounds: tuple[_Count | None, _Count | None] | None = None
    """Least and largest atomic batch size; None: unbounded."""
    global_batch_size: _UnknownCount = None
    """Batch size that the job runs with now."""
    max_batch_size: _UnknownCount = None
    """Largest batch size; None: the initial batch size."""
    max_profiled_replicas: Annotated[int, Field(ge=0)] = 0
    """Largest number of replicas that step times were measured on."""
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
    """What the layers cost, in the wire form of `LayerProfile`; from it other numbers of stages can
    be priced (`stage_speedups`). None: not measured."""
    balance: tuple[_Count, ...] | None = None
    """Number of layers of each stage as the job runs now; None: the best cut of `layers`."""
    memory_limit: _Positive | None = None
    """Bytes of a stage's device that stages may plan with; None: not bounded, or not known."""
    sharded_optimizer: bool = False
    """Whether replicas divide the optimizer's state of each stage among them."""
    remaining_samples: Annotated[float, Field(ge=0)] | None = None
    """Samples, each worth one of a batch of the initial size, that are left to train; None: the job
    does not know."""
    trained_samples: Annotated[float, Field(ge=0)] | None = None
    """Such samples that the job has trained, with those before its restarts; None: it does not
    say."""
    step_profile: StepRows | None = None
    """Step times that other jobs of the family begin with; None: there are none."""
    step_ratios: Annotated[tuple[_StepRatio, ...], Field(max_length=MAX_RATIOS)] | None = None
    """What `perf_params` leave over of measured steps, as `[nodes, replicas, measured time over
    predicted]`; None: nothing."""
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
        for nodes, replicas, _ in self.step_ratios or ():
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
        """Leave out fields that earlier readers do not know, where they are neutral."""
        written: dict[str, Any] = write(self)
        unknown = [name for name in _ONLY_KNOWN if getattr(self, name) is None]
        if not self.sharded_optimizer:
            unknown.append("sharded_optimizer")
        for name in unknown:
            written.pop(name, None)
            written.pop(to_camel(name), None)
        return written

    def _settle_stages(self) -> None:
        """Fill in omitted shares, and reject shares of another number of stages."""
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
        """Read hints from decoded JSON (or YAML).

        Raises:
            HintsError: naming the first key that is wrong, its value and what is allowed.
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

    @property
    def corrections(self) -> StepCorrections | None:
        """What measured steps say beyond the step time parameters; None: nothing."""
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
    """Return the allowed keys at a place in the hints."""
    if path == ["perfParams"]:
        return list(PerfParamsObject.model_fields)
    if path == ["gradParams"]:
        return list(GradParamsObject.model_fields)
    if path[:1] == ["stepProfile"]:
        model = StepRows if len(path) == 1 else StepRow
        return [to_camel(field) for field in model.model_fields]
    return [to_camel(field) for field in SchedHints.model_fields]
