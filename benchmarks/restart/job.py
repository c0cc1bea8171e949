"""The job of the restart benchmark: it records when it passes each point of its life."""

from __future__ import annotations

import os
import time
from pathlib import Path

STARTED = time.time()
import torch
from torch import nn
from torch.utils.data import TensorDataset

TORCH = time.time()
import pipollux
from pipollux_hybrid.elastic import step_boundary

IMPORTED = time.time()


def main() -> None:
    marks = {"started": STARTED, "torch": TORCH, "imported": IMPORTED}
    file = Path(os.environ["MARKS"]) / f"{os.environ['PIPOLLUX_ATTEMPT']}-{os.environ['RANK']}"

    def mark(name: str) -> None:
        marks[name] = time.time()
        file.write_text("\n".join(f"{key} {value!r}" for key, value in marks.items()))

    pipollux.init_process_group("gloo")
    mark("joined")
    width, layers = 1024, int(os.environ["LAYERS"])
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(module.parameters())
    loader = pipollux.AdaptiveDataLoader(
        TensorDataset(torch.randn(1, width).expand(1_000_000, width)), batch_size=8
    )
    mark("built")
    model = pipollux.HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    mark("restored")
    saves = step_boundary.save_all_states

    def save(**options: bool) -> Path | None:
        mark("agreed")
        path = saves(**options)
        mark("saved")
        return path

    step_boundary.save_all_states = save  # only records the time
    for _ in pipollux.remaining_epochs_until(1):
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if "stepped" not in marks:
                mark("stepped")


if __name__ == "__main__":
    try:
        main()
    finally:
        Path(os.environ["MARKS"], f"{os.environ['PIPOLLUX_ATTEMPT']}-end").write_text(
            repr(time.time())
        )
