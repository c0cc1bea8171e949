"""The single-process pipeline of one replica: GPipe over the devices of a process.

torchgpipe (Kim et al., 2020) provides the schedule, the copies and the threads. This package adds
batches that change from step to step (:mod:`.gpipe`), recomputation with the forward's thread-local
state (:mod:`.thread_state`, :mod:`.recompute`), any PyTree of tensors between layers
(:mod:`.microbatch`), unchanged inputs and errors that name the layer (:mod:`.stage`), and skip
connections (:mod:`.skip`) and batch normalization (:mod:`.batchnorm`) as in the plain model.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torchgpipe.skip.tracker import use_skip_tracker
from torchgpipe.stream import AbstractStream, new_stream

from pipollux_hybrid.errors import ConfigurationError

from .gpipe import PipelineRun
from .guards import StageGuards
from .microbatch import PyTree, flatten, gather, scatter, unmarked
from .microbatch_backward import separate
from .recompute import make_phonies
from .skip import SkipTracker, layout_of
from .stage import Stage
from .thread_state import ThreadLocalState

__all__ = [
    "CHECKPOINT_MODES",
    "PipelineEngine",
    "cut_stages",
    "num_recomputed",
    "with_index",
]

CHECKPOINT_MODES = ("always", "except_last", "never")


class PipelineEngine:
    """A sequential module cut into stages, one device each, to which the layers are moved.

    ``balance`` is the number of layers of each stage, from first to last, and ``checkpoint`` the
    recomputed micro-batches: ``"always"``, ``"except_last"`` or ``"never"``. Raises a
    ConfigurationError if the module cannot be cut like this.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        checkpoint: str,
    ) -> None:
        self.checkpoint = checkpoint
        self.devices = [with_index(device) for device in devices]
        _prepare_devices(self.devices)
        self.stages = [
            stage.place(device)
            for stage, device in zip(cut_stages(module, balance), self.devices, strict=True)
        ]
        self._layout = layout_of(module, self.stages)
        self._guards = [StageGuards(stage) for stage in self.stages]
        self._copy_streams: list[list[AbstractStream]] = [[] for _ in self.stages]

    def named_parameters(self, module: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
        """Return the parameters of each stage, with their names in the whole module."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        return [[(names[p], p) for p in stage.parameters()] for stage in self.stages]

    def checkpointed(self, num_microbatches: int, *, training: bool) -> int:
        """Return the number of recomputed micro-batches."""
        return num_recomputed(self.checkpoint, num_microbatches, training=training)

    def run(
        self, inputs: PyTree, sizes: Sequence[int], *, training: bool, separately: bool = False
    ) -> PyTree:
        """Run the forward of one batch; return its output PyTree, on the last device.

        Args:
            inputs: PyTree of tensors of shape [batch, …], on the first device.
            sizes: Samples of each micro-batch (:func:`microbatch_sizes`).
            training: Whether activations may be recomputed, which also requires gradients.
            separately: Whether parameters receive one gradient per micro-batch in any case, at less
                overlap of stages.
        """
        recomputed = self.checkpointed(len(sizes), training=training and torch.is_grad_enabled())
        if len(self.stages) == len(sizes) == 1 and not recomputed:
            return self._run_directly(inputs)
        run = PipelineRun(
            self.stages,
            scatter(inputs, sizes),
            recomputed,
            self._streams(len(sizes)),
            self._layout,
            ThreadLocalState.capture(device.type for device in self.devices),
            self._guards,
            separate=separately,
        )
        outputs = run.forward()
        return gather(separate(outputs) if separately else outputs, sizes)

    def _run_directly(self, inputs: PyTree) -> PyTree:
        """Run one micro-batch through one stage in the caller's thread, as in the plain model."""
        inputs = unmarked(inputs)
        stage = self.stages[0]
        if not isinstance(inputs, Tensor):
            flatten(inputs, "the input of the model")
        with ExitStack() as stack:
            if stage.device.type == "cuda":
                stack.enter_context(torch.cuda.device(stage.device))
            if self._layout.by_ns_name:
                stack.enter_context(use_skip_tracker(SkipTracker(self._layout)))
            output = stage(inputs)
        if not isinstance(output, Tensor):
            flatten(output, stage.output_name)
        return output

    def _streams(self, num_microbatches: int) -> list[list[AbstractStream]]:
        """Return a stream per micro-batch and stage; cached, as streams take memory."""
        for device, streams in zip(self.devices, self._copy_streams, strict=True):
            streams += [new_stream(device) for _ in range(num_microbatches - len(streams))]
        return self._copy_streams


def num_recomputed(checkpoint: str, num_microbatches: int, *, training: bool) -> int:
    """Return the number of recomputed micro-batches, counted from the first."""
    if not training or checkpoint == "never":
        return 0
    return num_microbatches - (checkpoint == "except_last")


def cut_stages(
    module: nn.Sequential, balance: Sequence[int], num_stages: int | None = None
) -> list[Stage]:
    """Return the layers of each stage, not moved; a ConfigurationError if a layer occurs twice."""
    layers = list(module._modules.items())
    _check_distinct(layers)
    ends = list(itertools.accumulate(balance))
    stages = []
    for k, (end, count) in enumerate(zip(ends, balance, strict=True)):
        chosen = {name: layer for name, layer in layers[end - count : end] if layer is not None}
        stages.append(Stage(chosen, k % (num_stages or len(balance))))
    return stages


def _check_distinct(layers: Sequence[tuple[str, nn.Module | None]]) -> None:
    first: dict[int, str] = {}
    for name, layer in layers:
        before = first.setdefault(id(layer), name)
        if before != name:
            raise ConfigurationError(
                f"layers {before!r} and {name!r} of the module are the same object: a "
                "layer belongs to one stage; make a layer of its own for each place, or one "
                "layer that applies it twice"
            )


def _prepare_devices(devices: Sequence[torch.device]) -> None:
    for device in devices:
        make_phonies(device)
    with warnings.catch_warnings():
        # torchgpipe's copies between GPUs use typed storages, for which torch warns once a process.
        warnings.simplefilter("ignore")
        torch.empty(0).storage()


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index, also for the current device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
