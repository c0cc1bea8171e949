"""A small network that reads handwritten digits: one stage, as many replicas as are worth it.

`digits_plain.py` is the same script before Pipollux. The 1797 images come inside scikit-learn.

    python examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pipollux


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Read handwritten digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    pipollux.init_process_group()
    torch.manual_seed(0)

    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0
    targets = torch.tensor(labels)
    held_out = torch.arange(len(targets)) % 5 == 0
    dataset = TensorDataset(inputs[~held_out], targets[~held_out])

    model = nn.Sequential(
        nn.Dropout2d(0.1),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = pipollux.AdaptiveDataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    loader.autoscale_batch_size(256, local_bsz_bounds=(8, 128), gradient_accumulation=True)
    model = pipollux.HybridParallel(model, optimizer, num_stages=1, num_microbatches=2)

    for epoch in pipollux.remaining_epochs_until(args.epochs):
        model.train()
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), labels.to(model.output_device, non_blocking=True))
            loss.backward()
            optimizer.step()
            pipollux.report(loss=loss)
        model.eval()
        with torch.no_grad():
            answers = model(inputs[held_out]).argmax(1).cpu()
        accuracy = (answers == targets[held_out]).float().mean().item()
        if pipollux.replica_rank() == 0:
            print(f"epoch {epoch}: accuracy on held-out images {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
