"""Error of one step's noise estimate with a single replica: micro-batches or successive steps.

`synthetic`: linear regression whose |g|² and tr Σ are known in closed form. `digits`: a small
network on scikit-learn's digits, against the gradients of all samples at the same parameters.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale

BATCH = 64
MICROBATCHES = (2, 4, 8, 16)
Problem = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]


def gradient(module: nn.Module, loss: Tensor) -> Tensor:
    """Flat, shape [parameters]."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


def one_step(estimates: Tensor, batch_size: int) -> tuple[float, float]:
    """(|g|², tr Σ) by the library's estimator, of J gradients over equal parts, shape [J, …]."""
    noise = GradientNoiseScale(init_batch_size=1)
    noise.update(
        total_sqr=float(estimates.mean(0).square().sum()),
        estimate_sqr=float(estimates.square().sum(1).mean()),
        num_estimates=len(estimates),
        batch_size=batch_size,
    )
    return noise._sqr.value, noise._var.value


def synthetic(width: int = 64) -> Problem:
    """Loss (w·x - t)² / 2 with x ~ N(0, I), t = ε."""
    module = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(module.weight, 0.1)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200_000, width, generator=generator, dtype=torch.float64)
    targets = torch.randn(200_000, 1, generator=generator, dtype=torch.float64)
    return module, inputs, targets, lambda y, t: (y - t).square().mean() / 2


def digits() -> Problem:
    """Three layers on images of 8 x 8."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()
    images, labels = load_digits(return_X_y=True)
    return module, torch.tensor(images) / 16, torch.tensor(labels), F.cross_entropy


def truth_synthetic(width: int = 64) -> tuple[float, float]:
    """|δ|² and (d + 1)|δ|² + d."""
    delta = width * 0.1**2
    return delta, (width + 1) * delta + width


def truth_of_all(problem: Problem) -> tuple[float, float]:
    """|g|² and tr Σ over all samples, one by one."""
    module, inputs, targets, loss = problem
    parameters = dict(module.named_parameters())

    def one(values: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        return loss(functional_call(module, values, (x[None],)), t[None])

    table = vmap(grad(one), in_dims=(None, 0, 0))(parameters, inputs, targets)
    each = torch.cat([part.detach().flatten(1) for part in table.values()], dim=1)
    mean = each.mean(0)
    return float(mean.square().sum()), float((each - mean).square().sum(1).mean())


def measure(
    problem: Problem,
    steps: int,
    rate: float,
    truth: Callable[[], tuple[float, float]],
    refresh: int,
) -> dict[str, list[tuple[float, float]]]:
    """Relative errors of (|g|² in units of tr Σ / B, tr Σ in units of itself) of every step."""
    module, inputs, targets, loss = problem
    generator = torch.Generator().manual_seed(1)
    errors: dict[str, list[tuple[float, float]]] = {}
    before: Tensor | None = None
    true = truth()
    for step in range(steps):
        if step % refresh == 0:
            true = truth()
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator)
        x, t = inputs[chosen], targets[chosen]
        finest = max(MICROBATCHES)
        parts = torch.stack(
            [
                gradient(module, loss(module(a), b))
                for a, b in zip(x.chunk(finest), t.chunk(finest), strict=True)
            ]
        )
        mean = parts.mean(0)
        found = {
            f"{m} micro-batches": one_step(parts.unflatten(0, (m, -1)).mean(1), BATCH)
            for m in MICROBATCHES
        }
        if before is not None:
            found["successive steps"] = one_step(torch.stack([before, mean]), 2 * BATCH)
        for name, (sqr, trace) in found.items():
            error = (sqr - true[0]) * BATCH / true[1], trace / true[1] - 1
            errors.setdefault(name, []).append(error)
        before = mean
        with torch.no_grad():
            offset = 0
            for parameter in module.parameters():
                parameter -= rate * mean[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
    return errors


def show(errors: dict[str, list[tuple[float, float]]]) -> None:
    print("| estimates of a step | tr Σ: bias | spread | |g|²: bias | spread |")
    for name, values in errors.items():
        table = torch.tensor(values, dtype=torch.float64)
        bias, spread, error = table.mean(0), table.std(0), table.std(0) / math.sqrt(len(values))
        print(
            f"| {name} | {bias[1]:+.3f} ± {2 * error[1]:.3f} | {spread[1]:.3f} "
            f"| {bias[0]:+.3f} ± {2 * error[0]:.3f} | {spread[0]:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    print("synthetic, parameters at rest")
    show(measure(synthetic(), steps, 0.0, truth_synthetic, steps))
    for rate in (0.05, 0.5):
        print(f"digits, SGD, learning rate {rate}, {steps // 10} steps")
        problem = digits()
        show(measure(problem, steps // 10, rate, lambda p=problem: truth_of_all(p), 2))


if __name__ == "__main__":
    main()
