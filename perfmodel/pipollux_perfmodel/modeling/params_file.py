"""`params.json`: the output of `pipollux fit`, and the input of `pipollux predict`.

    {"version": 1,
     "perf_params": [{"num_stages": 2, "alpha_c": 0.02, …}],   one per number of stages
     "init_batch_size": 32,                                    or null
     "grad_params": {"norm": 0.002, "var": 0.04},              or null
     "fit": {…}}                                               errors and assumptions; optional

The hints of a job (`SchedHints`, AdaptDL's JSON) are accepted instead. Unknown keys are errors:
silently dropping a key would silently misjudge the job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipollux_perfmodel import (
    GradParams,
    HintsError,
    ParamsError,
    PerfParams,
    SchedHints,
    even_shares,
    grad_params_from_json,
    grad_params_to_json,
    perf_params_from_json,
    perf_params_to_json,
)
from pipollux_utils.validation import closest, spell_value

from .errors import ModelingError
from .files import decode, read_text
from .fitting import StageFit

VERSION = 1
_KEYS = ("version", "perf_params", "init_batch_size", "grad_params", "fit")
_HINT_KEYS = ("perfParams", "gradParams", "initBatchSize", "numStages", "numMicrobatches")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of a job's configuration; None: not given."""

    max_batch_size: int | None = None
    atomic_bsz_range: tuple[int | None, int | None] | None = None
    accumulation: bool | None = None
    num_microbatches: tuple[int, ...] | None = None

    def or_else(self, other: Bounds) -> Bounds:
        """Return these bounds; omitted ones as in `other`."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return replace(other, **said)


NO_BOUNDS = Bounds()


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The known properties of a job."""

    perf_params: tuple[PerfParams, ...]
    """One per measured number of stages, in increasing order."""
    init_batch_size: int | None = None
    """Batch size that efficiency is relative to; None: unknown."""
    grad_params: GradParams | None = None
    assumed: Mapping[int, tuple[str, ...]] | None = None
    """By number of stages, the parameters that rest on priors; None: unknown."""
    bounds: Bounds = NO_BOUNDS

    @property
    def stages(self) -> tuple[int, ...]:
        """The measured numbers of stages."""
        return tuple(params.num_stages for params in self.perf_params)

    def nearest(self, num_stages: int) -> PerfParams:
        """Return the measured parameters with the nearest number of stages; the larger if tied."""
        return min(
            self.perf_params,
            key=lambda params: (abs(params.num_stages - num_stages), -params.num_stages),
        )


class FitSummary(NamedTuple):
    """The fits of a file of measurements, its name, and the number of skipped invalid rows."""

    source: str
    fits: tuple[StageFit, ...]
    num_skipped: int


def to_json_object(
    summary: FitSummary, init_batch_size: int | None, grad_params: GradParams | None
) -> dict[str, Any]:
    """Return the content of a `params.json`."""
    return {
        "version": VERSION,
        "perf_params": [
            {"num_stages": fit.num_stages, **_unversioned(perf_params_to_json(fit.perf_params))}
            for fit in summary.fits
        ],
        "init_batch_size": init_batch_size,
        "grad_params": grad_params and _unversioned(grad_params_to_json(grad_params)),
        "fit": {
            "source": summary.source,
            "num_rows": sum(len(fit.rows) for fit in summary.fits),
            "num_skipped": summary.num_skipped,
            "fits": [_fit_object(fit) for fit in summary.fits],
        },
    }


def to_text(content: Mapping[str, Any]) -> str:
    """Return the text of a `params.json`."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_model(path: str | Path) -> ModelFile:
    """Read a `params.json`, or the hints of a job. Raises ModelingError with the file, the key, its
    value and the allowed values.
    """
    text, name = read_text(path)
    try:
        return parse_model(decode(text))
    except ValueError as error:
        problem = error.problems if isinstance(error, ModelingError) else (str(error),)
        raise ModelingError(*(f"{name}: {one}" for one in problem)) from None


def parse_model(data: Any) -> ModelFile:
    """Return the content of a `params.json`, or of hints, from decoded JSON; as `read_model`."""
    if not isinstance(data, dict):
        raise ModelingError(
            f'{spell_value(data)} is not an object; it must begin with {{"version": {VERSION}'
        )
    if "perf_params" not in data and any(key in data for key in _HINT_KEYS):
        return _from_hints(data)
    for key in data:
        if key not in _KEYS:
            raise ModelingError(_unknown(key))
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ModelingError(
            f"version: {_spell(data, 'version')}; this Pipollux reads version {VERSION}"
        )
    params = _perf_params(data.get("perf_params"))
    return ModelFile(
        perf_params=params,
        init_batch_size=_init_batch_size(data.get("init_batch_size")),
        grad_params=_grad_params(data.get("grad_params")),
        assumed=_assumed(data.get("fit")),
    )


def _from_hints(data: Mapping[str, Any]) -> ModelFile:
    try:
        hints = SchedHints.from_json_object(data)
    except HintsError as error:
        raise ModelingError(str(error)) from None
    if hints.perf_params is None:
        raise ModelingError(
            "hints: perfParams is null; a job reports it after its first fit, "
            "so take hints that it reported later"
        )
    return ModelFile(
        perf_params=(hints.perf_params,),
        init_batch_size=hints.init_batch_size,
        grad_params=hints.grad_params,
        bounds=Bounds(
            max_batch_size=hints.max_batch_size,
            atomic_bsz_range=hints.local_bsz_bounds,
            accumulation=hints.gradient_accumulation,
            num_microbatches=(hints.num_microbatches,),
        ),
    )


def _unversioned(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "version"}


def _fit_object(fit: StageFit) -> dict[str, Any]:
    return {
        "num_stages": fit.num_stages,
        "num_rows": len(fit.rows),
        "stages_timed": fit.timed,
        "errors": [regime._asdict() for regime in fit.report.regimes],
        "assumed": [assumption._asdict() for assumption in fit.report.assumed],
        "outliers": [row.place for row in fit.outliers],
    }


def _perf_params(entries: Any) -> tuple[PerfParams, ...]:
    if not isinstance(entries, list) or not entries:
        raise ModelingError(
            f"perf_params: {spell_value(entries)} is not allowed; it must be a list of objects, "
            "one for each number of stages"
        )
    found: dict[int, PerfParams] = {}
    for index, entry in enumerate(entries):
        place = f"perf_params[{index}]"
        if not isinstance(entry, dict):
            raise ModelingError(f"{place}: {spell_value(entry)} is not allowed; give an object")
        number, params = _stage_params(place, entry)
        if number in found:
            raise ModelingError(f"{place}.num_stages: {number} occurs a second time")
        found[number] = params
    return tuple(found[number] for number in sorted(found))


def _stage_params(place: str, entry: Mapping[str, Any]) -> tuple[int, PerfParams]:
    values = dict(entry)
    number = values.pop("num_stages", 1)
    if type(number) is not int or number < 1:
        raise ModelingError(
            f"{place}.num_stages: {spell_value(number)} is not allowed; "
            "it must be a whole number from 1 on"
        )
    if not values.keys() & {"forward_shares", "backward_shares"}:
        values["forward_shares"], values["backward_shares"] = map(list, even_shares(number))
    try:
        params = perf_params_from_json(values)
    except ParamsError as error:
        raise ModelingError(f"{place}: {str(error).removeprefix('perf_params: ')}") from None
    if number != params.num_stages:
        raise ModelingError(
            f"{place}.num_stages: {number}, but forward_shares has {params.num_stages} entries; "
            "give one share for each stage"
        )
    return number, params


def _init_batch_size(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ModelingError(
            f"init_batch_size: {spell_value(value)} is not allowed; "
            "it must be a whole number from 1 on, or null"
        )
    return value


def _grad_params(value: Any) -> GradParams | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ModelingError(
            f"grad_params: {spell_value(value)} is not allowed; "
            'give {"norm": …, "var": …}, or null'
        )
    try:
        return grad_params_from_json(value)
    except ParamsError as error:
        raise ModelingError(str(error)) from None


def _assumed(fit: Any) -> dict[int, tuple[str, ...]] | None:
    if fit is None:
        return None
    try:
        return {
            int(one["num_stages"]): tuple(str(entry["parameter"]) for entry in one["assumed"])
            for one in fit["fits"]
        }
    except (KeyError, TypeError, ValueError):
        raise ModelingError(
            f"fit: {spell_value(fit)} is not what `pipollux fit` writes; leave it out, or fit again"
        ) from None


def _unknown(key: str) -> str:
    guess = closest(key, _KEYS)
    return f"{key}: unknown key; " + (
        f"did you mean '{guess}'?" if guess else f"choose from {', '.join(_KEYS)}"
    )


def _spell(entry: Mapping[str, Any], key: str) -> str:
    return f"is {spell_value(entry[key])}" if key in entry else "is missing"
