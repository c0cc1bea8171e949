"""Step time of a converted GPT-2 beside hand-written layers, and the time of its conversion.

    .venv/bin/python benchmarks/models/step_time.py

The hand-written layers are those of docs/howto/layers.md. Both train the same model in one process
in turn, and the ratio of each round is of two neighbouring blocks of steps.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from pipollux import as_layers

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "layers.md"
VOCABULARY = 512


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="of each of the two in a round")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    return parser.parse_args()


def model_of(layers: int, width: int) -> Any:
    torch.manual_seed(1)
    sizes = {"n_layer": layers, "n_head": 4, "n_embd": width, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def by_hand(gpt2: Any) -> nn.Sequential:
    """Return the layers that the page writes for the model."""
    block = next(x for x in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names: dict[str, Any] = {"__name__": "layers"}
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102  # our own page
    layers: nn.Sequential = names["gpt2_layers"](gpt2)
    return layers


def seconds(module: nn.Sequential, batch: dict[str, Tensor], steps: int) -> float:
    """Return the time of training steps without an optimizer."""
    started = time.perf_counter()
    for _ in range(steps):
        module.zero_grad()
        output = module(batch)
        logits = output if isinstance(output, Tensor) else output.logits
        F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten()).backward()
    return time.perf_counter() - started


def main() -> None:
    args = parse_arguments()
    ids = torch.randint(VOCABULARY, (args.batch, args.length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    theirs, ours = model_of(args.layers, args.width), model_of(args.layers, args.width)
    hand, converted = by_hand(theirs), as_layers(ours, batch)
    for module in (hand, converted):
        seconds(module, batch, args.steps)
    ratios = []
    for number in range(args.rounds):
        order = (hand, converted) if number % 2 else (converted, hand)
        took = {id(module): seconds(module, batch, args.steps) for module in order}
        ratios.append(took[id(converted)] / took[id(hand)])
    low, middle, high = statistics.quantiles(ratios, n=4)
    deep = model_of(24, args.width)
    times = {}
    for verify in (False, True):
        started = time.perf_counter()
        as_layers(deep, batch, verify=verify)
        times[verify] = time.perf_counter() - started
    step = seconds(by_hand(deep), batch, 3) / 3
    result = {
        "ratio": [round(x, 3) for x in (low, middle, high)],
        "construction of 24 layers, s": round(times[False], 2),
        "with verification, s": round(times[True], 2),
        "verification in steps of the example": round((times[True] - times[False]) / step, 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
