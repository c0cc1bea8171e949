"""LoRA adapters of PEFT in converted models: the base stays frozen, and they train as in a loop."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipollux_hybrid import HybridParallel, as_layers, init_process_group
from pipollux_hybrid.job import context as contexts
from tests.extent import first
from tests.hybrid.conversion.small_models import loss_of, make_batches, make_model
from tests.hybrid.stage_processes.training import run_stages

STEPS = 5
TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}


def with_adapters(name: str) -> Any:
    """Return a model with adapters that begin with random numbers, so that each has an effect."""
    import peft

    given = {"fan_in_fan_out": name == "gpt2", "init_lora_weights": False}
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=TARGETS[name], **given
    )
    base = make_model(name)
    torch.manual_seed(11)
    with warnings.catch_warnings():  # PEFT reads a property that transformers has renamed
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")
        model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)
    return model.double().train()


def adapters_of(model: Any) -> dict[str, Tensor]:
    return {name: x for name, x in model.named_parameters() if "lora_" in name}


def trained(name: str, schedule: str | None) -> tuple[Any, dict[str, Tensor]]:
    """Train two stages; return the model that was converted, and the whole state."""
    contexts.reset()
    init_process_group("gloo")
    model, batches = with_adapters(name), make_batches(name, STEPS)
    optimizer = torch.optim.AdamW(adapters_of(model).values(), lr=1e-2)
    wrapped = HybridParallel(
        model,
        optimizer,
        example_inputs=batches[0][0],
        num_stages=2,
        num_microbatches=2,
        schedule=schedule,
    )
    for batch, targets in batches:
        optimizer.zero_grad()
        wrapped.train_step(batch, targets, loss_of)
        frozen = [n for n, x in wrapped.named_parameters() if x.grad is not None]
        assert frozen
        assert all("lora_" in x for x in frozen), frozen
        optimizer.step()
    state: dict[str, Tensor] = wrapped.state_dict()
    return model, state


def trained_in_processes(name: str) -> dict[str, Tensor]:
    return trained(name, "1f1b")[1]


def trained_plainly(name: str) -> Any:
    model, batches = with_adapters(name), make_batches(name, STEPS)
    optimizer = torch.optim.AdamW(adapters_of(model).values(), lr=1e-2)
    for batch, targets in batches:
        optimizer.zero_grad()
        loss_of(model(**batch), targets).backward()
        optimizer.step()
    return model


def assert_same(found: dict[str, Tensor], name: str, expected: Any) -> None:
    before = with_adapters(name).state_dict()
    assert list(found) == list(before)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found[key].cpu(), value, rtol=1e-9, atol=1e-11)
        assert torch.equal(found[key].cpu(), before[key]) == ("lora_" not in key), key


@pytest.mark.parametrize("name", first(1, ["llama", "gpt2"]))
def test_adapters_train_as_in_a_loop(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    contexts.reset()
    try:
        model, state = trained(name, None)
        expected = trained_plainly(name)
        assert_same(state, name, expected)
        for each, folder in ((model, "ours"), (expected, "plain")):
            each.save_pretrained(tmp_path / folder)
    finally:
        contexts.reset()
    found, wanted = (
        load_file(tmp_path / x / "adapter_model.safetensors") for x in ("ours", "plain")
    )
    assert found.keys() == wanted.keys()
    assert len(found) == len(adapters_of(expected))
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11)
    settings = [
        json.loads((tmp_path / x / "adapter_config.json").read_text()) for x in ("ours", "plain")
    ]
    assert settings[0] == settings[1]


def test_adapters_can_be_disabled_for_a_while() -> None:
    model, batch = with_adapters("llama").eval(), make_batches("llama", 1)[0][0]
    layers = as_layers(model, batch)
    with model.disable_adapter():
        base = layers(batch).logits
        assert torch.equal(base, model(**batch).logits)
    adapted = layers(batch).logits
    assert torch.equal(adapted, model(**batch).logits)
    assert not torch.equal(adapted, base)


@pytest.mark.exhaustive
def test_adapters_train_in_stage_processes() -> None:
    stages = run_stages(
        trained_in_processes, 1, 2, "llama", environment={"PIPOLLUX_NUM_STAGES": "2"}
    )
    assert_same(stages[0][0], "llama", trained_plainly("llama"))
