"""Inside a training job: pipelines with data parallelism that a scheduler can scale.

A script wraps its ``nn.Sequential`` in :class:`HybridParallel`, its data set in
:class:`AdaptiveDataLoader` and its epochs in :func:`remaining_epochs_until`; everything else
(micro-batches, gradient synchronisation, batch sizes, checkpoints, hints) follows.
"""

from .accumulator import Accumulator
from .amp import GradScaler
from .bptt import AdaptiveBPTTIterator
from .buffers import CombinesBuffers, all_reduce_sum
from .checkpoint import State, load_state, save_all_states
from .data import AdaptiveDataLoader
from .epoch import current_epoch, remaining_epochs_until
from .errors import CheckpointError, ConfigurationError, PipolluxError, SynchronizationError
from .layer_profile import profile_layers
from .objectstate import keep
from .parallel import HybridParallel
from .process_group import (
    destroy_process_group,
    init_process_group,
    num_replicas,
    replica_rank,
)
from .report import report
from .sampler import ElasticSampler
from .scalars import TensorBoard
from .scaling import (
    AdamScale,
    AdaScale,
    LEGWScale,
    LinearScale,
    ScalingRule,
    ScalingState,
    SquareRootScale,
)
from .skip import Namespace, pop, skippable, stash

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
    "PipolluxError",
    "ScalingRule",
    "ScalingState",
    "SquareRootScale",
    "State",
    "SynchronizationError",
    "TensorBoard",
    "all_reduce_sum",
    "current_epoch",
    "destroy_process_group",
    "init_process_group",
    "keep",
    "load_state",
    "num_replicas",
    "pop",
    "profile_layers",
    "remaining_epochs_until",
    "replica_rank",
    "report",
    "save_all_states",
    "skippable",
    "stash",
]
