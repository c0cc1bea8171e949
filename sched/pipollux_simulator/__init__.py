"""Trace-driven simulator of a cluster, for evaluating policies on workloads in seconds."""

from __future__ import annotations

from pipollux_simulator.applications.base import (
    Application,
    JobModel,
    RunningJob,
    TrueStepTimes,
)
from pipollux_simulator.applications.devices import A100_40G, DEVICES, V100_16G, Device
from pipollux_simulator.applications.gpt import GPT_MODELS, GptModel
from pipollux_simulator.applications.pipeline import PipelineApplication
from pipollux_simulator.applications.pipeline_job import PipelineJob
from pipollux_simulator.applications.pipeline_model import PipelineJobModel
from pipollux_simulator.applications.registry import (
    check_room,
    devices_of,
    load_applications,
    requests_for,
)
from pipollux_simulator.applications.sia_model import SiaPipelineModel
from pipollux_simulator.applications.trace_model import FixedBatchModel, TraceJobModel
from pipollux_simulator.applications.traces import (
    CONSTANTS,
    Constants,
    TraceApplication,
    TraceError,
    read_applications,
)
from pipollux_simulator.engine.cluster import (
    Cluster,
    DecidesAt,
    Options,
    Result,
    SimulationError,
    Watch,
)
from pipollux_simulator.engine.failures import (
    FAILURES,
    SPOT,
    NodeEvent,
    Outages,
    merge_events,
    outages,
)
from pipollux_simulator.engine.isolated import IsolatedTimes
from pipollux_simulator.engine.job import Interval, SimulatedJob
from pipollux_simulator.engine.metrics import (
    JOB_COLUMNS,
    SimulationMetrics,
    job_rows,
    measure,
)
from pipollux_simulator.engine.outcome import JobOutcome, SimulationOutcome, outcome
from pipollux_simulator.engine.team_metrics import TeamMetrics, measure_teams
from pipollux_simulator.forecasting.errors import Estimate, PastError
from pipollux_simulator.forecasting.forecast import JobForecast, forecast
from pipollux_simulator.forecasting.sample import Effort
from pipollux_simulator.forecasting.state import (
    ForecastJob,
    ForecastState,
    ForecastSweep,
    JobKind,
)
from pipollux_simulator.workload.arrivals import JobArrival, read_workload, write_workload
from pipollux_simulator.workload.generate import generate

from .experiment import Experiment, Workload, make_nodes, node_events
from .known_length import KnownLength
from .parallel import run_pairs
from .workload.arrivals import scale_load
from .workload.terms import JobTerms

__all__ = [
    "A100_40G",
    "CONSTANTS",
    "DEVICES",
    "FAILURES",
    "GPT_MODELS",
    "JOB_COLUMNS",
    "SPOT",
    "V100_16G",
    "Application",
    "Cluster",
    "Constants",
    "DecidesAt",
    "Device",
    "Effort",
    "Estimate",
    "Experiment",
    "FixedBatchModel",
    "ForecastJob",
    "ForecastState",
    "ForecastSweep",
    "GptModel",
    "Interval",
    "IsolatedTimes",
    "JobArrival",
    "JobForecast",
    "JobKind",
    "JobModel",
    "JobOutcome",
    "JobTerms",
    "KnownLength",
    "NodeEvent",
    "Options",
    "Outages",
    "PastError",
    "PipelineApplication",
    "PipelineJob",
    "PipelineJobModel",
    "Result",
    "RunningJob",
    "SiaPipelineModel",
    "SimulatedJob",
    "SimulationError",
    "SimulationMetrics",
    "SimulationOutcome",
    "TeamMetrics",
    "TraceApplication",
    "TraceError",
    "TraceJobModel",
    "TrueStepTimes",
    "Watch",
    "Workload",
    "check_room",
    "devices_of",
    "forecast",
    "generate",
    "job_rows",
    "load_applications",
    "make_nodes",
    "measure",
    "measure_teams",
    "merge_events",
    "node_events",
    "outages",
    "outcome",
    "read_applications",
    "read_workload",
    "requests_for",
    "run_pairs",
    "scale_load",
    "write_workload",
]
