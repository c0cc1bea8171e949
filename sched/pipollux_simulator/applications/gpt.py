"""Layer profiles of GPT-like models of 1.3 to 13 billion parameters, computed from formulas.

Shapes are GPT-3's (Brown et al., 2020, table 2.1; the 5140 of 13B is printed there so), with
h = d_model, s = 2048 tokens per sample and a vocabulary of V = 50257. Per sample:

    forward of a block         24·s·h² + 4·s²·h flop            Narayanan et al., SC'21, section 3
    backward of a block        twice that, and 4·s²·h again     the attention's core is recomputed
    activations of a block     34·s·h bytes                     Korthikanti et al., 2022, section 4
    output of a block          2·s·h bytes                      half precision
    forward of the head        2·s·h·V flop                     its backward twice that
    activations of the head    4·s·h + 4·s·V bytes              its input, and logits for the loss

Parameters: 12·h² + 13·h of a block, V·h + s·h of the embedding, V·h of the head (a copy, as
pipelines keep it). Mixed precision with Adam takes 16 bytes per parameter: 2 the parameter, 2 its
gradient, 12 the optimizer's (a master copy and two moments; Rajbhandari et al., ZeRO, 2020). If a
pipeline recomputes (`RECOMPUTING`), a stage keeps only its input of all micro-batches but the
current one, and its backward is longer by its forward, which `pipollux_perfmodel` computes. A
layer's time is its flops over the achieved flops of the device, plus the launch of its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from pipollux_perfmodel import Layer, LayerProfile

from .devices import Device

SEQUENCE_LENGTH = 2048
VOCABULARY = 50257
PARAMETER_BYTES = 2
OPTIMIZER_BYTES = 12

# Kaplan et al., Scaling Laws for Neural Language Models, 2020: equations 1.4 and 1.6, table 3.
_TOKENS_AT_LOSS_ONE = 2.1e8
_LOSS_POWER = 0.21
_PARAMETERS_SCALE, _PARAMETERS_POWER = 6.5e13, 0.077
_STEPS_SCALE, _STEPS_POWER = 2.1e3, 0.76


@dataclass(frozen=True)
class GptModel:
    """One size of model, and how long a job trains it.

    >>> round(GPT_MODELS["gpt-13b"].num_parameters / 1e9, 1)
    13.2
    """

    name: str
    num_blocks: int
    hidden: int
    init_batch_size: int
    max_batch_size: int
    """Samples: the batch that GPT-3 of this size was trained with (table 2.1), over 2048 tokens."""
    iterations: int
    """At the initial batch size: a part of a training, as a whole training takes months."""
    trained_steps: int = 500
    """Iterations, at an infinite batch, before the job, which determine its initial loss."""

    @cached_property
    def num_parameters(self) -> int:
        """All parameters, including embedding and head."""
        h = self.hidden
        return self.num_blocks * _block_parameters(h) + (2 * VOCABULARY + SEQUENCE_LENGTH) * h

    def loss(self, iteration: float) -> float:
        """Return the loss in nats per token: L = (N_c/N)^0.077 + (S_c/S)^0.76 (Kaplan, eq. 1.6)."""
        steps = self.trained_steps + iteration
        size = (_PARAMETERS_SCALE / self.num_parameters) ** _PARAMETERS_POWER
        return float(size + (_STEPS_SCALE / steps) ** _STEPS_POWER)

    def noise_scale(self, iteration: float) -> float:
        """Return the noise scale in samples, which grows as the loss falls.

        The critical batch 2.1e8 tokens / L^(1/0.21) (Kaplan, eq. 1.4), used as the noise scale
        (McCandlish et al., 2018, derive one from the other).
        """
        tokens = _TOKENS_AT_LOSS_ONE / self.loss(iteration) ** (1 / _LOSS_POWER)
        return float(tokens / SEQUENCE_LENGTH)


GPT_MODELS = {
    model.name: model
    for model in (
        GptModel("gpt-1.3b", 24, 2048, 32, 512, 3000),
        GptModel("gpt-2.7b", 32, 2560, 32, 512, 4000),
        GptModel("gpt-6.7b", 32, 4096, 48, 1024, 2000),
        GptModel("gpt-13b", 40, 5140, 48, 1024, 3500),
    )
}


@lru_cache(maxsize=64)
def gpt_profile(model: GptModel, device: Device) -> LayerProfile:
    """Return the costs of a model's layers on a device: embedding, blocks, head.

    >>> from pipollux_simulator.applications.devices import A100_40G
    >>> gpt_profile(GPT_MODELS["gpt-1.3b"], A100_40G).num_layers
    26
    """
    s, h = SEQUENCE_LENGTH, model.hidden
    attention = 4.0 * s * s * h
    forward = 24.0 * s * h * h + attention
    block = _layer(device, forward, 2 * forward + attention, _block_parameters(h), 34.0 * s * h, h)
    embedding = _layer(device, 0.0, 0.0, (VOCABULARY + s) * h, 2.0 * s * h, h)
    logits = 2.0 * s * h * VOCABULARY
    kept = 4.0 * s * h + 4.0 * s * VOCABULARY
    head = _layer(device, logits, 2 * logits, VOCABULARY * h, kept, h)
    layers = [embedding._replace(name="embedding")]
    layers += [block._replace(name=f"block {index}") for index in range(model.num_blocks)]
    layers.append(head._replace(name="head", output_bytes=0.0))
    return LayerProfile(tuple(layers), input_bytes=8.0 * s)


def _layer(
    device: Device, forward: float, backward: float, parameters: int, kept: float, hidden: int
) -> Layer:
    return Layer(
        forward_alpha=device.launch_seconds,
        forward_beta=forward / device.flops,
        backward_alpha=2 * device.launch_seconds,
        backward_beta=backward / device.flops,
        parameter_bytes=PARAMETER_BYTES * float(parameters),
        optimizer_bytes=OPTIMIZER_BYTES * float(parameters),
        activation_bytes=kept,
        output_bytes=2.0 * SEQUENCE_LENGTH * hidden,
    )


def _block_parameters(hidden: int) -> int:
    return 12 * hidden * hidden + 13 * hidden
