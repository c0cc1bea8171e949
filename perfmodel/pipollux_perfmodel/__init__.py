"""The model of a job: step time, goodput, speedup, and the hints that carry it to a scheduler.

It knows neither torch nor a cluster; `docs/performance-model.md` has the formulas and sources.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .goodput import GoodputFunction
from .layers import Layer, LayerProfile, Link
from .memory import largest_micro_bsz, stage_memory
from .optimum import Optimum
from .params import GradParams, PerfParams, even_shares
from .partition import least_memory, partition
from .plan import StagePlan, correct_profile, plan_stages, price_stages, restage
from .schedule import (
    Schedule,
    StageEvent,
    bubble_fraction,
    gpipe_schedule,
    one_f_one_b_schedule,
)
from .speedup import Configuration, SpeedupFunction
from .stage_speedups import stage_speedups
from .steptime import StepTime

if TYPE_CHECKING:
    from .confidence import Assumption, FitReport, RegimeError
    from .fit import FitResult, fit_measurements, fit_perf_params
    from .hints import HintsError, SchedHints
    from .reference import fit_like_adaptdl
    from .wire import (
        ParamsError,
        grad_params_from_json,
        grad_params_to_json,
        perf_params_from_json,
        perf_params_to_json,
    )

__all__ = [
    "Assumption",
    "Configuration",
    "FitReport",
    "FitResult",
    "GoodputFunction",
    "GradParams",
    "HintsError",
    "Layer",
    "LayerProfile",
    "Link",
    "Optimum",
    "ParamsError",
    "PerfParams",
    "RegimeError",
    "SchedHints",
    "Schedule",
    "SpeedupFunction",
    "StageEvent",
    "StagePlan",
    "StepTime",
    "bubble_fraction",
    "correct_profile",
    "even_shares",
    "fit_like_adaptdl",
    "fit_measurements",
    "fit_perf_params",
    "gpipe_schedule",
    "grad_params_from_json",
    "grad_params_to_json",
    "largest_micro_bsz",
    "least_memory",
    "one_f_one_b_schedule",
    "partition",
    "perf_params_from_json",
    "perf_params_to_json",
    "plan_stages",
    "price_stages",
    "restage",
    "stage_memory",
    "stage_speedups",
]

_LATER = {
    "confidence": ("Assumption", "FitReport", "RegimeError"),
    "fit": ("FitResult", "fit_measurements", "fit_perf_params"),
    "hints": ("HintsError", "SchedHints"),
    "reference": ("fit_like_adaptdl",),
    "wire": (
        "ParamsError",
        "grad_params_from_json",
        "grad_params_to_json",
        "perf_params_from_json",
        "perf_params_to_json",
    ),
}
"""Modules that import scipy, autograd or pydantic, which takes longer than a script should wait."""
_MODULES = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name's module when the name is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
