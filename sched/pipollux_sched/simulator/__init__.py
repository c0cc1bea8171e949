"""Trace-driven simulator of a cluster: policies tried on workloads, in seconds instead of days."""

from __future__ import annotations

from .application import Application, JobModel, Running, StepTimes
from .catalogue import check_room, devices_of, load_applications, requests_for
from .devices import A100_40G, DEVICES, V100_16G, Device
from .engine import Cluster, Options, Result, SimulationError, Watch
from .experiment import Experiment, Workload, make_nodes, node_events
from .failures import FAILURES, SPOT, NodeEvent, Outages, merge_events, outages
from .generate import generate
from .gpt import GPT_MODELS, GptModel
from .isolated import IsolatedTimes
from .job import Interval, SimulatedJob
from .known_length import KnownLength
from .load import scale_load
from .metrics import JOB_COLUMNS, Metrics, job_rows, measure
from .outcome import JobOutcome, Outcome, outcome
from .pipeline_application import PipelineApplication
from .pipeline_job import PipelineJob
from .pipeline_model import PipelineJobModel
from .sia_model import SiaPipelineModel
from .side_by_side import run_pairs
from .trace_model import FixedBatchModel, TraceJobModel
from .traces import CONSTANTS, Constants, TraceApplication, TraceError, read_applications
from .workload import JobArrival, read_workload, write_workload

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
    "Device",
    "Experiment",
    "FixedBatchModel",
    "GptModel",
    "Interval",
    "IsolatedTimes",
    "JobArrival",
    "JobModel",
    "JobOutcome",
    "KnownLength",
    "Metrics",
    "NodeEvent",
    "Options",
    "Outages",
    "Outcome",
    "PipelineApplication",
    "PipelineJob",
    "PipelineJobModel",
    "Result",
    "Running",
    "SiaPipelineModel",
    "SimulatedJob",
    "SimulationError",
    "StepTimes",
    "TraceApplication",
    "TraceError",
    "TraceJobModel",
    "Watch",
    "Workload",
    "check_room",
    "devices_of",
    "generate",
    "job_rows",
    "load_applications",
    "make_nodes",
    "measure",
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
