"""Properties and methods of the wrapped model besides running batches."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipollux_hybrid.checkpoint.parameter_groups import plain_name
from pipollux_hybrid.checkpoint.tied_names import with_last_values
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.module_wrapper import ModuleWrapper
from pipollux_hybrid.optim.clipping import clip_over_stages
from pipollux_hybrid.pipeline.engine import PipelineEngine
from pipollux_hybrid.pipeline.num_microbatches import chosen_microbatches
from pipollux_hybrid.sync.tied_copies import TiedCopies
from pipollux_hybrid.telemetry.chrome_trace import Tracer
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel import LayerProfile

if TYPE_CHECKING:
    from pipollux_hybrid.pipeline.process_engine import ProcessEngine


class PipelineModel(ModuleWrapper):
    """A module cut into stages: its partition, its measurements, and operations over all stages."""

    _context: JobContext
    _engine: PipelineEngine | ProcessEngine
    _metrics: Metrics
    _layer_profile: LayerProfile | None
    _complete: bool
    """Whether the gradients of an iteration are complete."""
    _norm: Tensor
    """The norm of the last clipped gradients."""
    _elsewhere: frozenset[str]
    """Names of the parameters and buffers in other processes of the replica."""
    _tied: TiedCopies | None
    """Parameters that other stages hold copies of."""
    balance: list[int]
    """Number of layers of each stage; interleaved, of each of K·V chunks."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain module's state, keyed by its own layer names whatever the balance.

        In a multi-process pipeline all processes of a replica call it, and all get the whole state,
        with tensors of other stages on the CPU. One of them then writes a file::

            state = model.state_dict()
            if pipollux.process_rank() == 0:
                torch.save(state, path)

        Raises:
            SynchronizationError: Another process of the replica makes another call, or has ended.
        """
        state, mesh = super().state_dict(*args, **kwargs), self._context.mesh
        if mesh is None:
            return state
        mesh.calls.meet("model.state_dict()")
        packed = io.BytesIO()
        torch.save(dict(state), packed)
        for stage, content in enumerate(mesh.gather_from_stages(packed.getvalue())):
            if stage != self._context.env.stage:
                state.update(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the plain module's state, whether its layers were compiled or not.

        A process loads the entries of its own stage.
        """
        if self._tied is not None:
            state_dict = with_last_values(state_dict, self._tied.names(), strict=strict)
        here = {n: x for n, x in state_dict.items() if plain_name(n) not in self._elsewhere}
        return super().load_state_dict(here, strict, assign)

    @property
    def num_stages(self) -> int:
        """Number K of stages."""
        return self._context.pipeline.num_stages

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage, including those of other processes."""
        if self._context.mesh is not None:
            return list(self._context.pipeline.devices)
        return self._engine.devices

    @property
    def layer_profile(self) -> LayerProfile | None:
        """The layers' costs on ``example_inputs``, measured by rank 0; None without them."""
        return self._layer_profile

    @property
    def gain(self) -> float:
        """AdaScale's gain: steps of the initial batch size that a current step is worth.

        1 until the gradient's noise is measured.
        """
        return self._metrics.gain

    @property
    def output_device(self) -> torch.device:
        """The last stage's device, of the output and the targets."""
        return self._engine.devices[-1]

    @property
    def num_microbatches(self) -> int:
        """Number M of micro-batches per batch; set it to None to have it chosen."""
        return self._context.batch.num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, value: int | None) -> None:
        spec = self._context.pipeline
        spec.microbatches_follow = value is None
        self._context.batch.num_microbatches = chosen_microbatches(value, spec.num_stages)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the time line of the next optimizer step to a file for Perfetto.

        One row per stage of this replica. The file is written after the step, on GPUs a step later.
        With ``PIPOLLUX_TRACE_DIR`` one is written every half minute.

        Args:
            path: The file, by convention ``….json``.
        """
        self._context.component(Tracer).request(path)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most ``max_norm``.

        Call it between ``backward()`` and ``optimizer.step()``, in every pass of the loop body. On
        accumulation steps it does nothing, as the gradients are incomplete: it clips the gradient
        of the whole batch, as :func:`torch.nn.utils.clip_grad_norm_` does with the plain model.

        Args:
            max_norm: Largest norm of the result.
            norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.
            error_if_nonfinite: Whether a norm that is not finite is an error.
            foreach: As in :func:`torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping, over all stages, a scalar tensor; on accumulation steps that
            of the last complete iteration, NaN before the first.

        Raises:
            RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
        """
        if self._complete:
            options = norm_type, error_if_nonfinite, foreach
            self._norm = clip_over_stages(
                self._context.mesh, self._tied, list(self.module.parameters()), max_norm, *options
            )
        return self._norm
