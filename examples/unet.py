"""A small U-Net that says of every pixel which digit it belongs to, as a pipeline of stages.

Its skip connections reach over stages: what a `Down` stashes goes straight to the device where the
`Up` of the same size pops it. Batch normalisation keeps running statistics of whole batches,
however they are cut. A picture is four of the handwritten digits that come inside scikit-learn.

    python examples/unet.py
    torchrun --nproc-per-node 2 examples/unet.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import pipollux

CLASSES = 11  # ten digits, and paper


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Four digits of 8 x 8 pixels beside and below each other, and what each pixel is."""

    def __init__(self, digits: Tensor, labels: Tensor, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(len(digits), (count, 2, 2), generator=generator)
        pixels, labels = digits[chosen], labels[chosen][..., None, None]
        kinds = torch.where(pixels > 0.25, labels, CLASSES - 1)
        self.images = pixels.permute(0, 1, 3, 2, 4).reshape(count, 1, 16, 16)
        self.kinds = kinds.permute(0, 1, 3, 2, 4).reshape(count, 16, 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.kinds[index]


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, [batch, inputs, height, width] to [batch, outputs, height, width]."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


@pipollux.skippable(stash=["fine"])
class Down(nn.Module):
    """Convolves, keeps the result for the `Up` of this size, and hands on half the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = convolutions(inputs, outputs)

    def forward(self, x: Tensor) -> Iterator[object]:
        fine = self.convolutions(x)
        yield pipollux.stash("fine", fine)
        return F.max_pool2d(fine, 2)


@pipollux.skippable(pop=["fine"])
class Up(nn.Module):
    """Doubles the resolution, and convolves that with what the `Down` of this size kept."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.convolutions = convolutions(2 * outputs, outputs)

    def forward(self, x: Tensor) -> Iterator[object]:
        fine = yield pipollux.pop("fine")
        return self.convolutions(torch.cat((self.grow(x), fine), dim=1))


def unet(width: int, depth: int) -> nn.Sequential:
    """Layers in a row: downwards, the bottom, upwards, and a class for each pixel."""
    sizes = [pipollux.Namespace() for _ in range(depth)]  # each `Down` has an `Up` of its own
    widths = [width << level for level in range(depth + 1)]
    downs = [
        Down(1 if level == 0 else widths[level - 1], widths[level]).isolate(sizes[level])
        for level in range(depth)
    ]
    ups = [
        Up(widths[level + 1], widths[level]).isolate(sizes[level])
        for level in reversed(range(depth))
    ]
    bottom = convolutions(widths[-2], widths[-1])
    return nn.Sequential(*downs, bottom, *ups, nn.Conv2d(width, CLASSES, 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--stages", type=int, default=3, help="GPipe stages of a replica")
    parser.add_argument("--batch-size", type=int, default=32, help="initial, over all replicas")
    parser.add_argument("--pictures", type=int, default=2000, help="to train on")
    parser.add_argument("--width", type=int, default=16, help="channels at full resolution")
    parser.add_argument("--depth", type=int, default=2, help="times that the resolution is halved")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    pipollux.init_process_group()
    torch.manual_seed(0)

    pixels, labels = load_digits(return_X_y=True)
    digits, kinds = torch.tensor(pixels).float().view(-1, 8, 8) / 16.0, torch.tensor(labels)
    held_out = torch.arange(len(kinds)) % 5 == 0
    train_set = Pictures(digits[~held_out], kinds[~held_out], args.pictures)
    test_set = Pictures(digits[held_out], kinds[held_out], 256)

    module = unet(args.width, args.depth)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    loader = pipollux.AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    loader.autoscale_batch_size(128, local_bsz_bounds=(8, 64), gradient_accumulation=True)
    test_loader = pipollux.AdaptiveDataLoader(test_set, batch_size=64)
    sums = pipollux.Accumulator()
    # The sample is for measuring the layers, so that stages are cut where they take equally long.
    model = pipollux.HybridParallel(
        module, optimizer, num_stages=args.stages, example_inputs=train_set.images[:16]
    )
    if pipollux.replica_rank() == 0:
        print(f"layers of each stage: {model.balance}", flush=True)

    for epoch in pipollux.remaining_epochs_until(args.epochs):
        model.train()
        for images, classes in loader:
            optimizer.zero_grad()
            classes = classes.to(model.output_device, non_blocking=True)
            loss = F.cross_entropy(model(images), classes)
            loss.backward()
            optimizer.step()
            pipollux.report(loss=loss)

        model.eval()
        with torch.no_grad():
            for images, classes in test_loader:
                answers = model(images)[:, :-1].argmax(1).cpu()
                ink = classes < CLASSES - 1
                sums["right"] += (answers == classes)[ink].sum()
                sums["ink"] += ink.sum()
        with sums.synchronized():
            accuracy = float(sums["right"] / sums["ink"])
            sums.clear()
        if pipollux.replica_rank() == 0:
            print(f"epoch {epoch}: {accuracy:.3f} of the held-out ink read right", flush=True)


if __name__ == "__main__":
    main()
