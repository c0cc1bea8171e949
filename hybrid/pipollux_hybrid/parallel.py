"""HybridParallel: a sequential model as a pipeline, and the pipeline copied by data parallelism."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipollux_perfmodel.params import Checkpoint

from .arguments import as_tensor, batch_size_of, check_arguments
from .balance import choose_balance, choose_devices
from .checkpoint import load_state
from .context import JobContext, context
from .engine import PipelineEngine, Tensors, microbatch_sizes
from .errors import ConfigurationError
from .microbatches import initial_microbatches
from .modelstate import ModelState
from .noise_meter import NoiseMeter
from .optim import AdaptiveOptimizer
from .scaling import ScalingRule, default_rule
from .stagetimer import StageTimer, stage_times
from .synchronizer import GradientSynchronizer, SyncResult

__all__ = ["HybridParallel"]

TIMED_EVERY = 10
"""Every so many iterations the stages of one backward are timed."""


class HybridParallel(nn.Module):
    """Trains an ``nn.Sequential`` as GPipe stages within a process and replicas across processes.

    Its outputs and gradients are those of the plain module on the whole batch: micro-batches,
    accumulation steps and replicas are weighed by their samples, provided the loss is a MEAN over
    the batch dimension. ``backward()`` averages gradients over the replicas; the optimizer steps
    when an iteration is complete, at a learning rate that follows the batch size.

    Example::

        model = nn.Sequential(...)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model = HybridParallel(model, optimizer, num_stages=2, num_microbatches=4)

    Args:
        module: The layers. Each takes and gives a tensor or a tuple of tensors, shape [batch, …].
        optimizer: An optimizer over ``module.parameters()``.
        num_stages: Number K of stages. A scheduler's choice (``PIPOLLUX_NUM_STAGES``) goes before
            it.
        balance: Number of layers of each stage, instead of ``num_stages``; by default stages are
            cut so that the slowest is as fast as can be.
        num_microbatches: Number M of micro-batches that a batch is cut into; it may be changed
            between steps through the attribute of the same name. None: one for one stage, 4·K for
            more (or as many as there are samples), and from there it follows the goodput, where
            ``autoscale_batch_size`` lets it.
        devices: One device per stage; by default ``PIPOLLUX_DEVICES``, else this replica's share
            of the CUDA devices (K from ``LOCAL_RANK`` · K on), else the CPU.
        checkpoint: When activations are recomputed: ``"always"``, ``"except_last"``, ``"never"``.
        sample: A batch to time the layers on for the balance; by default they are weighed by
            their parameters.
        scaling_rule: How the learning rate follows the batch size; by default AdaScale, and its
            square root for Adam and its kin.
        lr_scheduler: A scheduler over ``optimizer`` whose state belongs into checkpoints.

    Raises:
        ConfigurationError: An argument is wrong; the message names it and what is allowed.
    """

    def __init__(
        self,
        module: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        *,
        num_stages: int | None = None,
        balance: Sequence[int] | None = None,
        num_microbatches: int | None = None,
        devices: Sequence[torch.device | str] | None = None,
        checkpoint: str = "except_last",
        sample: Tensors | None = None,
        scaling_rule: ScalingRule | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        super().__init__()
        ctx = context()
        check_arguments(module, optimizer, checkpoint)
        self._context = ctx
        self.module = module
        _broadcast(ctx, module)
        balance = choose_balance(ctx, module, num_stages, balance, sample)
        chosen = choose_devices(ctx.env, len(balance), devices)
        # Hidden from nn.Module: its layers are those of `module`, which alone names them.
        self.__dict__["_engine"] = PipelineEngine(module, balance, chosen, checkpoint)
        self._engine: PipelineEngine
        self.balance = list(balance)
        ctx.metrics.num_stages = len(balance)
        self.num_microbatches = num_microbatches
        self._context.checkpoint_mode = cast(Checkpoint, checkpoint)
        self._rule = scaling_rule or default_rule(optimizer)
        self._complete = True
        self._no_sync = False
        self._result: SyncResult | None = None
        self._countdown = 1
        self._timer = StageTimer(self._engine.stages, chosen)
        self._synchronizer = GradientSynchronizer(
            [self._named_parameters(stage) for stage in self._engine.stages],
            num_replicas=ctx.env.num_replicas,
            preconditioner=lambda parameter: self._optimizer.preconditioner(parameter),
            on_gradient=self._timer.gradient_arrived,
            on_finished=self._backward_finished,
        )
        self._optimizer = AdaptiveOptimizer(
            optimizer,
            is_complete=lambda: self._complete,
            factor=self._rate_factor,
            on_step=self._stepped,
        )
        self._noise = NoiseMeter(ctx, list(module.parameters()), self._optimizer.preconditioner)
        load_state(ModelState(module, optimizer, lr_scheduler))

    @property
    def num_stages(self) -> int:
        """Number K of stages."""
        return len(self.balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return self._engine.devices

    @property
    def output_device(self) -> torch.device:
        """The last stage's device, where the output is and the targets have to be."""
        return self._engine.devices[-1]

    @property
    def num_microbatches(self) -> int:
        """Number M of micro-batches that a batch is cut into; set it to None to have it chosen."""
        return self._context.num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, value: int | None) -> None:
        ctx = self._context
        ctx.microbatches_follow = value is None
        if value is None:
            # A batch of fewer samples is cut into as many micro-batches as it has samples.
            ctx.num_microbatches = initial_microbatches(self.num_stages, sys.maxsize)
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"num_microbatches={value!r}: a whole number of at least 1, or None to have it "
                "chosen, is needed"
            )
        ctx.num_microbatches = value

    def forward(self, *inputs: Tensor | tuple[Tensor, ...]) -> Tensors:
        """Run a batch through the pipeline.

        Args:
            *inputs: One tensor or tuple of tensors, or several tensors, each of shape [batch, …].

        Returns:
            What the module returns, on :attr:`output_device`.
        """
        batch = self._on_first_device(inputs)
        size = batch_size_of(batch)
        sizes = microbatch_sizes(size, self.num_microbatches)
        learns = self.training and torch.is_grad_enabled()
        if learns:
            self._prepare(sizes)
        output = self._engine.run(batch, len(sizes), training=self.training)
        if learns:
            for tensor in output if isinstance(output, tuple) else (output,):
                if tensor.requires_grad:
                    tensor.register_hook(self._synchronizer.start_backward)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients without synchronising or stepping, for loops without an adaptive loader.

        As with DistributedDataParallel, the gradients of several backwards add up.
        """
        self._no_sync = True
        try:
            yield
        finally:
            self._no_sync = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's state, keyed by its own layer names whatever the balance."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the plain module's state."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _prepare(self, sizes: list[int]) -> None:
        micro_step = self._context.micro_step
        ends = micro_step.is_optimizer_step if micro_step else not self._no_sync
        num_recomputed = self._engine.checkpointed(len(sizes), training=True)
        self._synchronizer.begin(
            sizes,
            num_recomputed,
            counted=micro_step is None or micro_step.num_samples > 0,
            synchronize=ends,
            weighted=micro_step is not None,
            measured=self._noise.wanted(),
        )
        if ends:
            self._countdown -= 1
            if self._countdown <= 0:
                self._countdown = TIMED_EVERY
                self._timer.start(num_recomputed)

    def _backward_finished(self, result: SyncResult | None) -> None:
        self._complete = result is not None
        self._context.metrics.note_backward(result.sync_time if result else 0.0)
        if result is None:
            self._optimizer.keep_gradients()
            return
        self._result = result
        if self._timer.running:
            self._report_stages()
        if self._noise.wanted():
            self._noise.measure(result)

    def _report_stages(self) -> None:
        events = self._timer.stop()
        if events and self._context.micro_step is not None:
            count = max(event.microbatch for event in events) + 1
            self._context.metrics.add_timeline(events, *stage_times(events, self.num_stages, count))

    def _rate_factor(self) -> float:
        scale, noise = self._context.scale, self._context.metrics.noise
        if scale == 1.0 or noise is None:
            return 1.0
        return self._rule.factor(scale, noise.gain(scale))

    def _stepped(self) -> None:
        self._noise.stepped()
        if self._result is not None:
            self._context.metrics.note_step(self._result.batch_size, self._context.scale)

    def _named_parameters(self, stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return [(names[parameter], parameter) for parameter in stage.parameters()]

    def _on_first_device(self, inputs: tuple[Tensor | tuple[Tensor, ...], ...]) -> Tensors:
        batch = inputs[0] if len(inputs) == 1 else inputs
        device = self._engine.devices[0]
        if isinstance(batch, tuple):
            return tuple(as_tensor(x).to(device, non_blocking=True) for x in batch)
        return as_tensor(batch).to(device, non_blocking=True)


def _broadcast(ctx: JobContext, module: nn.Module) -> None:
    """All replicas begin with rank 0's parameters and buffers."""
    if ctx.env.num_replicas == 1:
        return
    # NCCL carries nothing that is not on a GPU, and layers are placed only after this.
    nccl = dist.get_backend() == "nccl"
    carrier = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        carried = tensor.detach().to(carrier)
        dist.broadcast(carried, src=0)
        tensor.data.copy_(carried)
