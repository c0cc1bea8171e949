"""The model of a job: step time, goodput, speedup, and the hints that carry it to a scheduler.

It depends on neither torch nor a cluster; `docs/concepts/goodput.md` has the formulas and sources.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipollux_perfmodel.errors import InputError, PipolluxError
    from pipollux_perfmodel.fitting.adaptdl import fit_like_adaptdl
    from pipollux_perfmodel.fitting.fit import FitResult, fit_measurements, fit_perf_params
    from pipollux_perfmodel.fitting.report import Assumption, FitReport, RegimeError
    from pipollux_perfmodel.goodput.config_search import ConfigSearch, Optimum, search_all
    from pipollux_perfmodel.goodput.goodput import GoodputFunction
    from pipollux_perfmodel.goodput.speedup import Configuration, SpeedupFunction, speedups_of
    from pipollux_perfmodel.hints.codec import (
        ParamsError,
        grad_params_from_json,
        grad_params_to_json,
        perf_params_from_json,
        perf_params_to_json,
    )
    from pipollux_perfmodel.hints.hints import HintsError, SchedHints
    from pipollux_perfmodel.hints.stage_speedups import stage_speedups
    from pipollux_perfmodel.partitioning.chunks import chunk_cuts, cut_chunks
    from pipollux_perfmodel.partitioning.interleaved_memory import interleaved_memory
    from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile, Link
    from pipollux_perfmodel.partitioning.memory import largest_micro_bsz, stage_memory
    from pipollux_perfmodel.partitioning.partition import least_memory, partition
    from pipollux_perfmodel.partitioning.restage import restage
    from pipollux_perfmodel.partitioning.schedules import (
        ScheduleOption,
        compare_schedules,
        least_schedule_memory,
        reschedule,
    )
    from pipollux_perfmodel.partitioning.stage_plan import (
        StagePlan,
        correct_profile,
        plan_stages,
        price_stages,
    )
    from pipollux_perfmodel.timing.params import GradParams, PerfParams, even_shares
    from pipollux_perfmodel.timing.step_time import StepTime
    from pipollux_perfmodel.timing.timeline import (
        Schedule,
        StageEvent,
        bubble_fraction,
        gpipe_schedule,
        ideal_schedule,
        one_f_one_b_schedule,
    )

__all__ = [
    "Assumption",
    "ConfigSearch",
    "Configuration",
    "FitReport",
    "FitResult",
    "GoodputFunction",
    "GradParams",
    "HintsError",
    "InputError",
    "Layer",
    "LayerProfile",
    "Link",
    "Optimum",
    "ParamsError",
    "PerfParams",
    "PipolluxError",
    "RegimeError",
    "SchedHints",
    "Schedule",
    "ScheduleOption",
    "SpeedupFunction",
    "StageEvent",
    "StagePlan",
    "StepTime",
    "bubble_fraction",
    "chunk_cuts",
    "compare_schedules",
    "correct_profile",
    "cut_chunks",
    "even_shares",
    "fit_like_adaptdl",
    "fit_measurements",
    "fit_perf_params",
    "gpipe_schedule",
    "grad_params_from_json",
    "grad_params_to_json",
    "ideal_schedule",
    "interleaved_memory",
    "largest_micro_bsz",
    "least_memory",
    "least_schedule_memory",
    "one_f_one_b_schedule",
    "partition",
    "perf_params_from_json",
    "perf_params_to_json",
    "plan_stages",
    "price_stages",
    "reschedule",
    "restage",
    "search_all",
    "speedups_of",
    "stage_memory",
    "stage_speedups",
]

_HOMES = {
    "goodput.config_search": ("ConfigSearch", "Optimum", "search_all"),
    "goodput.goodput": ("GoodputFunction",),
    "goodput.speedup": ("Configuration", "SpeedupFunction", "speedups_of"),
    "hints.stage_speedups": ("stage_speedups",),
    "partitioning.layer_profile": ("Layer", "LayerProfile", "Link"),
    "partitioning.interleaved_memory": ("interleaved_memory",),
    "partitioning.memory": ("largest_micro_bsz", "stage_memory"),
    "partitioning.partition": ("least_memory", "partition"),
    "partitioning.schedules": (
        "ScheduleOption",
        "compare_schedules",
        "least_schedule_memory",
        "reschedule",
    ),
    "partitioning.chunks": ("chunk_cuts", "cut_chunks"),
    "partitioning.stage_plan": (
        "StagePlan",
        "correct_profile",
        "plan_stages",
        "price_stages",
    ),
    "partitioning.restage": ("restage",),
    "timing.params": ("GradParams", "PerfParams", "even_shares"),
    "timing.step_time": ("StepTime",),
    "timing.timeline": (
        "Schedule",
        "StageEvent",
        "bubble_fraction",
        "gpipe_schedule",
        "ideal_schedule",
        "one_f_one_b_schedule",
    ),
    "errors": ("InputError", "PipolluxError"),
    "fitting.report": ("Assumption", "FitReport", "RegimeError"),
    "fitting.fit": ("FitResult", "fit_measurements", "fit_perf_params"),
    "hints.hints": ("HintsError", "SchedHints"),
    "fitting.adaptdl": ("fit_like_adaptdl",),
    "hints.codec": (
        "ParamsError",
        "grad_params_from_json",
        "grad_params_to_json",
        "perf_params_from_json",
        "perf_params_to_json",
    ),
}
"""Names by module, imported on first use: numpy, scipy, autograd and pydantic import slowly."""
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name's module when the name is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
