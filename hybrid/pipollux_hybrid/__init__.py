"""Inside a training job: pipelines with data parallelism that a scheduler can scale.

A script wraps its ``nn.Sequential`` in :class:`HybridParallel`, its data set in
:class:`AdaptiveDataLoader` and its epochs in :func:`remaining_epochs_until`; everything else
(micro-batches, gradient synchronisation, batch sizes, checkpoints, hints) follows.
"""

from .accumulator import Accumulator
from .bptt import AdaptiveBPTTIterator
from .checkpoint import State, load_state, save_all_states
from .data import AdaptiveDataLoader
from .epoch import current_epoch, remaining_epochs_until
from .errors import CheckpointError, ConfigurationError, PipolluxError, SynchronizationError
from .parallel import HybridParallel
from .process_group import (
    destroy_process_group,
    init_process_group,
    num_replicas,
    replica_rank,
)
from .report import report
from .sampler import ElasticSampler
from .scaling import AdamScale, AdaScale, LinearScale, ScalingRule, SquareRootScale

__all__ = [
    "Accumulator",
    "AdaScale",
    "AdamScale",
    "AdaptiveBPTTIterator",
    "AdaptiveDataLoader",
    "CheckpointError",
    "ConfigurationError",
    "ElasticSampler",
    "HybridParallel",
    "LinearScale",
    "PipolluxError",
    "ScalingRule",
    "SquareRootScale",
    "State",
    "SynchronizationError",
    "current_epoch",
    "destroy_process_group",
    "init_process_group",
    "load_state",
    "num_replicas",
    "remaining_epochs_until",
    "replica_rank",
    "report",
    "save_all_states",
]
