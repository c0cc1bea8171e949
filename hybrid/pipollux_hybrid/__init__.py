"""Code inside a training job: pipelines with data parallelism that a scheduler can scale.

A script wraps its ``nn.Sequential`` in :class:`HybridParallel`, its data set in
:class:`AdaptiveDataLoader` and its epochs in :func:`remaining_epochs_until`; everything else
(micro-batches, gradient synchronization, batch sizes, checkpoints, hints) is automatic.
"""

from pipollux_hybrid.checkpoint.manager import load_state, save_all_states
from pipollux_hybrid.checkpoint.state import State
from pipollux_hybrid.checkpoint.stateful import register_for_checkpointing
from pipollux_hybrid.conversion.as_layers import as_layers
from pipollux_hybrid.elastic.accumulator import Accumulator
from pipollux_hybrid.elastic.bptt import AdaptiveBPTTIterator
from pipollux_hybrid.elastic.epoch import current_epoch, remaining_epochs_until
from pipollux_hybrid.elastic.loader import AdaptiveDataLoader
from pipollux_hybrid.elastic.metric_report import report_metric
from pipollux_hybrid.elastic.process_group import (
    destroy_process_group,
    device_mesh,
    init_process_group,
    num_replicas,
    process_rank,
    replica_rank,
)
from pipollux_hybrid.elastic.sampler import ElasticSampler
from pipollux_hybrid.optim.grad_scaler import GradScaler
from pipollux_hybrid.optim.scaling_rules import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    ScalingRule,
    ScalingState,
    SquareRootScale,
)
from pipollux_hybrid.partition.layer_profiler import profile_layers
from pipollux_hybrid.pipeline.loss import WeightedLoss
from pipollux_hybrid.pipeline.samples import per_sample, whole
from pipollux_hybrid.pipeline.skip import Namespace, pop, skippable, stash
from pipollux_hybrid.pipeline.state_changes import per_microbatch
from pipollux_hybrid.push_pull.options import OuterSGD, PushPull
from pipollux_hybrid.sync.buffers import CombinesBuffers, all_reduce_sum
from pipollux_hybrid.telemetry.report import TensorBoard, report

from .errors import CheckpointError, ConfigurationError, PipolluxError, SynchronizationError
from .parallel import HybridParallel

__all__ = [
    "Accumulator",
    "AdaScale",
    "AdamScale",
    "AdaptiveBPTTIterator",
    "AdaptiveDataLoader",
    "CheckpointError",
    "CombinesBuffers",
    "ConfigurationError",
    "ElasticSampler",
    "GradScaler",
    "HybridParallel",
    "LEGWScale",
    "LinearScale",
    "Namespace",
    "OuterSGD",
    "PipolluxError",
    "PushPull",
    "ScalingRule",
    "ScalingState",
    "SquareRootScale",
    "State",
    "SynchronizationError",
    "TensorBoard",
    "WeightedLoss",
    "all_reduce_sum",
    "as_layers",
    "current_epoch",
    "destroy_process_group",
    "device_mesh",
    "init_process_group",
    "load_state",
    "num_replicas",
    "per_microbatch",
    "per_sample",
    "pop",
    "process_rank",
    "profile_layers",
    "register_for_checkpointing",
    "remaining_epochs_until",
    "replica_rank",
    "report",
    "report_metric",
    "save_all_states",
    "skippable",
    "stash",
    "whole",
]
