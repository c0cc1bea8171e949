"""Trace-driven simulator of a cluster: policies tried on workloads, in seconds instead of days."""

from __future__ import annotations

from .application import Application, JobModel, Running, StepTimes
from .devices import A100_40G, DEVICES, V100_16G, Device
from .failures import FAILURES, SPOT, NodeEvent, Outages, merge_events, outages
from .generate import generate
from .gpt import GPT_MODELS, GptModel
from .pipeline_application import PipelineApplication
from .pipeline_job import PipelineJob
from .pipeline_model import PipelineJobModel
from .sia_model import SiaPipelineModel
from .workload import JobArrival, read_workload, write_workload

__all__ = [
    "A100_40G",
    "DEVICES",
    "FAILURES",
    "GPT_MODELS",
    "SPOT",
    "V100_16G",
    "Application",
    "Device",
    "GptModel",
    "JobArrival",
    "JobModel",
    "NodeEvent",
    "Outages",
    "PipelineApplication",
    "PipelineJob",
    "PipelineJobModel",
    "Running",
    "SiaPipelineModel",
    "StepTimes",
    "generate",
    "merge_events",
    "outages",
    "read_workload",
    "write_workload",
]
