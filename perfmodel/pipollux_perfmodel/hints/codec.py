"""`PerfParams` and `GradParams` as JSON: keys, values and validation errors.

Keys are the field names; `gradParams` is AdaptDL's {norm, var}. JSON written by AdaptDL is accepted
unchanged. Unknown keys and numbers out of range are errors. A standalone object carries its
version; inside hints their version applies.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from pipollux_perfmodel.errors import InputError
from pipollux_perfmodel.partitioning.layer_profile import LayerProfile
from pipollux_perfmodel.timing.params import (
    AUTO,
    CHECKPOINTS,
    MAX_LEVELS,
    Checkpoints,
    GradParams,
    PerfParams,
    ScheduleKind,
    check_params,
    check_shares,
    joined_modes,
)
from pipollux_utils.validation import expected

_Model = TypeVar("_Model", bound=BaseModel)

STRICT_KEYS = ConfigDict(extra="forbid", allow_inf_nan=False)
VERSION = 1
MAX_LAYERS = 2048
"""Most layers of a profile in hints; more would send megabytes every few seconds."""
MAX_CHUNKS = 8
"""Most chunks per stage: the order of their work is simulated."""

MAX_STEPS = 2**31
"""Most steps between two pushes."""

_Seconds = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
# Always written; other fields only if they are not neutral.
_ALWAYS = (*PerfParams._fields[:7], "forward_shares", "backward_shares", "overlap")


def _read_modes(value: Any) -> Checkpoints:
    words = value if isinstance(value, list | tuple) else [value]
    modes = [mode for word in words for mode in CHECKPOINTS if mode == word]
    if not words or len(modes) != len(words):
        raise PydanticCustomError(
            "checkpoint", "it must be 'never', 'except_last' or 'always', or a list of these"
        )
    return joined_modes(modes)


def _write_modes(value: Checkpoints) -> str | list[str]:
    return value if isinstance(value, str) else list(value)


CheckpointsField = Annotated[
    Checkpoints, PlainValidator(_read_modes), PlainSerializer(_write_modes, when_used="json")
]
"""One mode for all stages, or a list with one mode per stage."""


class ParamsError(InputError):
    """Invalid parameters; one sentence with key, value and remedy."""


class PerfParamsObject(BaseModel):
    """The JSON object of `PerfParams`; omitted shares mean equally slow stages."""

    model_config = STRICT_KEYS

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
    forward_alpha_shares: tuple[_Share, ...] = ()
    backward_alpha_shares: tuple[_Share, ...] = ()
    alpha_t: tuple[_Seconds, ...] = ()
    beta_t: tuple[_Seconds, ...] = ()
    transfers_overlap: bool = True
    checkpoint: CheckpointsField = "never"
    gradient_shares: tuple[_Share, ...] = ()
    shared_link: bool = True
    gamma_c: Annotated[float, Field(ge=1)] = 1.0
    contention: Annotated[float, Field(ge=0)] = 0.0
    growth_n: float = 1.0
    two_node_penalty: Annotated[float, Field(ge=0)] = 0.0
    overhead: _Seconds = 0.0
    schedule: ScheduleKind = "gpipe"
    chunks_per_stage: Annotated[int, Field(ge=1, le=MAX_CHUNKS)] = 1
    tied_exchange: _Seconds = 0.0
    sync_every: Annotated[int, Field(ge=AUTO, le=MAX_STEPS)] = 0
    sync_overlap: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    alpha_levels: Annotated[tuple[_Seconds, ...], Field(max_length=MAX_LEVELS - 1)] = ()
    beta_levels: Annotated[tuple[_Seconds, ...], Field(max_length=MAX_LEVELS - 1)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.alpha_c + self.beta_c <= 0:
            raise ValueError("alpha_c and beta_c are both 0; a micro-batch must take some time")
        if self.forward_shares is not None or self.backward_shares is not None:
            check_shares(self.forward_shares or (), self.backward_shares or ())
            check_params(_perf_params_from(self))
        return self


class GradParamsObject(BaseModel):
    """The JSON object of `GradParams`."""

    model_config = STRICT_KEYS

    norm: Annotated[float, Field(ge=0)]
    """GradParams.sqr."""
    var: Annotated[float, Field(ge=0)]


class _VersionedPerfParams(PerfParamsObject):
    version: Literal[1] = 1


class _VersionedGradParams(GradParamsObject):
    version: Literal[1] = 1


def perf_params_to_json(params: PerfParams) -> dict[str, Any]:
    """Return step time parameters as an object for `json.dumps`.

    >>> perf_params_to_json(PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5))["alpha_c"]
    0.1
    """
    return {"version": VERSION, **_perf_params_to(params)}


def perf_params_from_json(value: Mapping[str, Any]) -> PerfParams:
    """Return step time parameters from decoded JSON, of Pipollux or of AdaptDL (seven numbers).

    Raises ParamsError with the first wrong key, its value and the allowed values.
    """
    checked = _validate(_VersionedPerfParams, "perf_params", value)
    params = _perf_params_from(checked)
    if params.forward_shares:
        return params
    try:
        return check_params(params._replace(**_ONE_STAGE))
    except ValueError as error:  # copies, say, as between several stages
        raise ParamsError(f"perf_params: {error}") from None


def grad_params_to_json(params: GradParams) -> dict[str, Any]:
    """Return size and noise of the gradient as an object for `json.dumps`, keys norm and var."""
    return {"version": VERSION, **_grad_params_to(params)}


def grad_params_from_json(value: Mapping[str, Any]) -> GradParams:
    """Return size and noise of the gradient from decoded JSON; ParamsError if it is invalid."""
    return _grad_params_from(_validate(_VersionedGradParams, "grad_params", value))


def describe(error: ValidationError, what: str, known: Callable[[list[str]], list[str]]) -> str:
    """Return one sentence about an error: key, value, allowed values. `what` names the whole
    object; `known` returns the allowed keys at a path in it.
    """
    details = error.errors(include_url=False)
    first = details[0]
    # Pydantic adds the type that it tried of a union, as in tuple[int, float].
    key = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    if first["type"] == "extra_forbidden":
        *path, name = map(str, first["loc"])
        text = f"{what}: {key} is not a known key; {_suggestion(name, known(path))}"
    elif first["type"] == "value_error":
        text = f"{what}: {key + ': ' if key else ''}{first['ctx']['error']}"
    elif first["type"] == "missing":
        text = f"{what}: {key} is missing; give it"
    else:
        text = f"{what}: {key or 'the whole'} is {first['input']!r:.60}; it must be "
        text += expected(first)
    more = len(details) - 1
    return f"{text} (and {more} more)" if more else text


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


def _validate(model: type[_Model], what: str, value: Any) -> _Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        known = list(model.model_fields)
        raise ParamsError(describe(error, what, lambda _path: known)) from None


def _perf_params_from(value: PerfParamsObject) -> PerfParams:
    fields = value.model_dump(exclude_none=True, exclude={"version"})
    # Without shares zero stages for now: the caller knows their number.
    fields.setdefault("forward_shares", ())
    fields.setdefault("backward_shares", ())
    return PerfParams(**fields)


_ONE_STAGE: Any = {
    name: PerfParams._field_defaults[name] for name in ("forward_shares", "backward_shares")
}


def _grad_params_from(value: GradParamsObject) -> GradParams:
    return GradParams(value.norm, value.var)


def _grad_params_to(value: GradParams) -> dict[str, float]:
    return {"norm": float(value.sqr), "var": float(value.var)}


def _perf_params_to(value: PerfParams) -> dict[str, Any]:
    return {
        key: _plain(field)
        for key, field in value._asdict().items()
        if key in _ALWAYS or field != PerfParams._field_defaults[key]
    }


def _plain(field: Any) -> Any:
    if isinstance(field, tuple):
        return [x if isinstance(x, str) else float(x) for x in field]
    return field if isinstance(field, bool | str | int) else float(field)


def _wire(model: type[BaseModel], tuple_type: type, decode: Any, encode: Any) -> Any:
    """Return an annotation that gives a NamedTuple the keys, checks and schema of `model`."""

    def schema(_source: Any, handler: Any) -> core_schema.CoreSchema:
        inner = handler(model)
        checked = core_schema.no_info_after_validator_function(decode, inner)
        return core_schema.no_info_before_validator_function(
            lambda value: encode(value) if isinstance(value, tuple_type) else value,
            checked,
            serialization=core_schema.plain_serializer_function_ser_schema(encode),
        )

    return GetPydanticSchema(schema)


PerfParamsField = Annotated[
    PerfParams, _wire(PerfParamsObject, PerfParams, _perf_params_from, _perf_params_to)
]
"""`PerfParams` as a field of a pydantic model."""
GradParamsField = Annotated[
    GradParams, _wire(GradParamsObject, GradParams, _grad_params_from, _grad_params_to)
]
"""`GradParams` as a field of a pydantic model."""


def _read_layers(value: Any) -> LayerProfile:
    if isinstance(value, LayerProfile):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r:.60} is not a layer profile; give an object with layers")
    entries = value.get("layers")
    count = len(entries) if isinstance(entries, list) else 0
    if count > MAX_LAYERS:
        raise ValueError(f"the profile has {count} layers; give at most {MAX_LAYERS}")
    return LayerProfile.from_json_object(value)


LayersField = Annotated[
    LayerProfile, PlainValidator(_read_layers), PlainSerializer(LayerProfile.to_json_object)
]
"""`LayerProfile` as a field of a pydantic model, in its own JSON format."""
