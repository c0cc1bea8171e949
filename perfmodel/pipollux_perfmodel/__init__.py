"""The model of a job: step time, goodput, speedup, and the hints that carry it to a scheduler.

It knows neither torch nor a cluster; `docs/performance-model.md` has the formulas and sources.
"""

from .fit import fit_perf_params
from .goodput import GoodputFunction
from .hints import HintsError, SchedHints
from .params import GradParams, PerfParams, even_shares
from .partition import partition
from .schedule import StageEvent, bubble_fraction, gpipe_schedule
from .speedup import Configuration, SpeedupFunction
from .steptime import StepTime

__all__ = [
    "Configuration",
    "GoodputFunction",
    "GradParams",
    "HintsError",
    "PerfParams",
    "SchedHints",
    "SpeedupFunction",
    "StageEvent",
    "StepTime",
    "bubble_fraction",
    "even_shares",
    "fit_perf_params",
    "gpipe_schedule",
    "partition",
]
