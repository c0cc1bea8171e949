"""What a running job tells the scheduler about itself.

The JSON is AdaptDL's (camelCase keys, `gradParams` as {norm, var}, `perfParams` as its seven
numbers), accepted as it is, with three keys more: `numStages`, `numMicrobatches`, `version`; and in
`perfParams` the three numbers of a pipeline. Whatever else is in it is refused by name, for a hint
that is silently dropped is a job that is silently misjudged.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import core_schema

from .goodput import GoodputFunction
from .params import GradParams, PerfParams, check_shares, even_shares
from .speedup import SpeedupFunction

_STRICT_KEYS = ConfigDict(extra="forbid", allow_inf_nan=False)

_Seconds = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class HintsError(ValueError):
    """Hints that cannot be believed; its text is one sentence naming key, value and remedy."""


class _PerfParamsObject(BaseModel):
    """The JSON object `perfParams`; shares left out mean equally slow stages."""

    model_config = _STRICT_KEYS

    alpha_c: _Seconds
    beta_c: _Seconds
    alpha_n: _Seconds
    beta_n: _Seconds
    alpha_r: _Seconds
    beta_r: _Seconds
    gamma: Annotated[float, Field(ge=1, le=10)]
    forward_shares: tuple[_Share, ...] | None = None
    backward_shares: tuple[_Share, ...] | None = None
    overlap: _Share = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.alpha_c + self.beta_c <= 0:
            raise ValueError("alpha_c and beta_c are both 0; a micro-batch must take some time")
        if self.forward_shares is not None or self.backward_shares is not None:
            check_shares(self.forward_shares or (), self.backward_shares or ())
        return self


class _GradParamsObject(BaseModel):
    """The JSON object `gradParams`."""

    model_config = _STRICT_KEYS

    norm: Annotated[float, Field(ge=0)]
    var: Annotated[float, Field(ge=0)]


def _perf_params_from(value: _PerfParamsObject) -> PerfParams:
    fields = value.model_dump(exclude_none=True)
    # No shares: zero stages for now, SchedHints knows how many there are.
    fields.setdefault("forward_shares", ())
    fields.setdefault("backward_shares", ())
    return PerfParams(**fields)


def _grad_params_from(value: _GradParamsObject) -> GradParams:
    return GradParams(value.norm, value.var)


def _grad_params_to(value: GradParams) -> dict[str, float]:
    return {"norm": float(value.sqr), "var": float(value.var)}


def _perf_params_to(value: PerfParams) -> dict[str, Any]:
    return {
        key: list(map(float, field)) if isinstance(field, tuple) else float(field)
        for key, field in value._asdict().items()
    }


def _wire(model: type[BaseModel], tuple_type: type, decode: Any, encode: Any) -> Any:
    """Give a NamedTuple the JSON form of `model`: its keys, its checks, its schema."""

    def schema(_source: Any, handler: Any) -> core_schema.CoreSchema:
        inner = handler(model)
        checked = core_schema.no_info_after_validator_function(decode, inner)
        return core_schema.no_info_before_validator_function(
            lambda value: encode(value) if isinstance(value, tuple_type) else value,
            checked,
            serialization=core_schema.plain_serializer_function_ser_schema(encode),
        )

    return GetPydanticSchema(schema)


_PerfParams = Annotated[
    PerfParams, _wire(_PerfParamsObject, PerfParams, _perf_params_from, _perf_params_to)
]
_GradParams = Annotated[
    GradParams, _wire(_GradParamsObject, GradParams, _grad_params_from, _grad_params_to)
]


def _zero_is_unknown(value: Any) -> Any:
    """AdaptDL writes 0 for a size that it does not know yet."""
    return None if value == 0 and not isinstance(value, bool) else value


_Count = Annotated[int, Field(ge=1)]
_UnknownCount = Annotated[_Count | None, BeforeValidator(_zero_is_unknown)]


class SchedHints(BaseModel):
    """Hints of one job: snake_case in Python, camelCase in JSON.

    Example:
        >>> hints = SchedHints.from_json_object({"initBatchSize": 32, "numStages": 2})
        >>> hints.num_stages, hints.to_json_object()["initBatchSize"]
        (2, 32)
    """

    model_config = ConfigDict(
        **_STRICT_KEYS, alias_generator=to_camel, populate_by_name=True, frozen=True
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
    grad_params: _GradParams | None = None
    """Size and noise of the gradient; None: not measured yet."""
    perf_params: _PerfParams | None = None
    """Step time parameters; None: not fitted yet."""
    num_stages: _Count = 1
    """K, the stages of one pipeline replica."""
    num_microbatches: _Count = 1
    """M, the micro-batches of one forward and backward."""
    version: Literal[1] = 1
    """Version of this format."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_sizes()
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

    def _settle_stages(self) -> None:
        """Fill in the shares that were left out, and refuse those of another number of stages."""
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
        object.__setattr__(self, "perf_params", settled)

    @classmethod
    def from_json_object(cls, value: Mapping[str, Any]) -> SchedHints:
        """Read hints from decoded JSON (or YAML).

        Raises:
            HintsError: naming the first key that is wrong, its value and what is allowed.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise HintsError(describe(error)) from None

    def to_json_object(self) -> dict[str, Any]:
        """Return the hints as a dict for `json.dumps`, keys in camelCase."""
        return self.model_dump(mode="json", by_alias=True)

    def goodput_function(self) -> GoodputFunction | None:
        """Return the job's goodput; None until its sizes, step times and gradients are known."""
        if self.perf_params is None or self.grad_params is None or self.init_batch_size is None:
            return None
        return GoodputFunction(self.perf_params, self.grad_params, self.init_batch_size)

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
        )


def describe(error: ValidationError) -> str:
    """Say in one sentence what is wrong with hints: key, value, what is allowed."""
    details = error.errors(include_url=False)
    first = details[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"hints: {key} is not a known key; {_suggestion(key)}"
    elif first["type"] == "value_error":
        text = f"hints: {key + ': ' if key else ''}{first['ctx']['error']}"
    elif first["type"] == "missing":
        text = f"hints: {key} is missing; give it"
    else:
        reason = first["msg"][:1].lower() + first["msg"][1:]
        text = f"hints: {key or 'the whole'} is {first['input']!r:.60}; {reason}"
    more = len(details) - 1
    return f"{text} (and {more} more)" if more else text


def _suggestion(key: str) -> str:
    *path, name = key.split(".")
    if path == ["perfParams"]:
        known = list(_PerfParamsObject.model_fields)
    elif path == ["gradParams"]:
        known = list(_GradParamsObject.model_fields)
    else:
        known = [to_camel(field) for field in SchedHints.model_fields]
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
