"""Errors of predicted step times on configurations that were not fitted.

    .venv/bin/python benchmarks/pipeline-accuracy/accuracy.py rows.jsonl

The rows are those of `measure.py`. As inside a job, there is one fit for each number of stages K. A
split defines the fitted and the predicted configurations; the error of a prediction is |predicted /
measured - 1|. The last splits predict a K that has never run from the times of layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize

from pipollux_perfmodel import GoodputFunction, PerfParams, fit_measurements
from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile
from pipollux_perfmodel.partitioning.stage_plan import price_stages

SEEDS = range(5)
Row = dict[str, Any]


class Errors(NamedTuple):
    """Relative errors of predictions, in turn for accumulation and optimizer steps."""

    accum: list[float]
    optim: list[float]


class Split(NamedTuple):
    """One selection of fitted rows; all others are predicted."""

    name: str
    fitted: Callable[[Row, random.Random], bool]
    num_draws: int = 1


def draw(row: Row, chance: random.Random) -> bool:
    del row
    return chance.random() < 0.5


def draw_one_in_eight(row: Row, chance: random.Random) -> bool:
    return row["num_replicas"] == 1 or chance.random() < 0.125


SPLITS = (
    Split("all fitted (in sample)", lambda *_: True),
    Split("half of them, drawn at random (5 draws)", draw, len(SEEDS)),
    Split("M <= 2, predict M = 4, 8", lambda row, _: row["num_microbatches"] <= 2),
    Split("b <= 8, predict b = 16, 32", lambda row, _: micro_bsz(row) <= 8),
    Split("R = 1 and one in eight of R = 2 (5 draws)", draw_one_in_eight, len(SEEDS)),
    Split("R = 1, predict R = 2", lambda row, _: row["num_replicas"] == 1),
)


def micro_bsz(row: Row) -> int:
    return int(row["atomic_bsz"] // row["num_microbatches"])


def backward_with_recomputation(row: Row) -> list[float]:
    """The backward of a recomputed micro-batch, by stage.

    The timers give means over the micro-batches of a step, of which `except_last` leaves the last
    one shorter by its forward.
    """
    share = 1 / row["num_microbatches"] if row["checkpoint"] == "except_last" else 0.0
    return [g + share * f for f, g in zip(row["forward"], row["backward"], strict=True)]


def fit(rows: Sequence[Row]) -> PerfParams:
    def column(name: str) -> list[Any]:
        return [row[name] for row in rows]

    return fit_measurements(
        *map(column, ("num_nodes", "num_replicas", "atomic_bsz")),
        *map(column, ("accum_step_time", "optim_step_time")),
        num_microbatches=column("num_microbatches"),
        forward=column("forward"),
        backward=[backward_with_recomputation(row) for row in rows],
        num_stages=rows[0]["num_stages"],
        checkpoint=rows[0]["checkpoint"],
    ).perf_params


def errors(params: PerfParams, rows: Sequence[Row]) -> Errors:
    function = GoodputFunction(params, (1.0, 1.0), 1)
    found = Errors([], [])
    for row in rows:
        where = (row["num_nodes"], row["num_replicas"], row["atomic_bsz"])
        predicted = function.step_time(*where, 0, row["num_microbatches"])
        found.accum.append(abs(predicted.accum_time / row["accum_step_time"] - 1))
        found.optim.append(abs(predicted.optim_time / row["optim_step_time"] - 1))
    return found


def errors_of(split: Split, rows: Sequence[Row]) -> Errors:
    """Errors on rows that were not fitted (on all if all were fitted), over all draws."""
    total = Errors([], [])
    for seed in range(split.num_draws):
        chance = random.Random(seed)  # noqa: S311  # a draw that can be repeated, not a secret
        chosen = [split.fitted(row, chance) for row in rows]
        fitted = [row for row, yes in zip(rows, chosen, strict=True) if yes]
        others = [row for row, yes in zip(rows, chosen, strict=True) if not yes]
        if not fitted or (not others and split is not SPLITS[0]):
            continue
        for sums, found in zip(total, errors(fit(fitted), others or rows), strict=True):
            sums.extend(found)
    return total


# --- a number of stages that has never run ------------------------------------------------------


def profile_of(layers: Sequence[Row]) -> LayerProfile:
    """The layers as lines in b."""
    entries = []
    for _, group in itertools.groupby(sorted(layers, key=_layer), key=_layer):
        there = list(group)
        forward, backward = (_line(there, phase) for phase in ("forward", "backward"))
        entries.append(Layer(*forward, *backward, parameter_bytes=there[0]["parameter_bytes"]))
    return LayerProfile.from_layers(entries)


def _layer(entry: Row) -> int:
    return int(entry["layer"])


def _line(layer: Sequence[Row], phase: str) -> tuple[float, float]:
    """(alpha, beta) >= 0 by least squares of relative errors."""
    times = np.array([entry[phase] for entry in layer])
    sizes = np.array([entry["micro_bsz"] for entry in layer], float)
    columns = np.stack((np.ones_like(sizes), sizes), axis=1) / times[:, None]
    alpha, beta = scipy.optimize.nnls(columns, np.ones_like(sizes))[0]
    return float(alpha), float(beta)


class Correction(NamedTuple):
    """What a job adds to the times of its layers."""

    scale: float = 1.0
    """Of the times of the layers."""
    overhead: float = 0.0
    """Seconds per micro-batch in each stage."""

    def apply(self, params: PerfParams) -> PerfParams:
        """Add it to parameters from layers."""
        added = self.overhead * params.num_stages
        whole = max(self.scale * params.alpha_c + added, 1e-12)
        # As of layers, a third is in the forward.
        return params._replace(
            alpha_c=whole,
            beta_c=self.scale * params.beta_c,
            forward_alpha_shares=_mixed(params, params.forward_alpha_shares, added / whole, 1 / 3),
            backward_alpha_shares=_mixed(
                params, params.backward_alpha_shares, added / whole, 2 / 3
            ),
        )


def _mixed(
    params: PerfParams, shares: tuple[float, ...], weight: float, part: float
) -> tuple[float, ...]:
    even = part / params.num_stages
    return tuple((1 - weight) * s + weight * even for s in shares or (even,) * params.num_stages)


def price(profile: LayerProfile, row: Row, base: PerfParams) -> PerfParams:
    """Parameters of the row's stages. One thread drives all stages on CPUs, so ω is 0."""
    base = base._replace(overlap=0.0)
    return price_stages(profile, row["balance"], base, checkpoint=row["checkpoint"])


def correction(profile: LayerProfile, rows: Sequence[Row], base: PerfParams) -> Correction:
    """Excess of accumulation steps of one replica over their layers, by least squares."""
    lines = []
    for row in rows:
        if row["num_replicas"] > 1:
            continue
        function = GoodputFunction(price(profile, row, base), (1.0, 1.0), 1)
        step = function.step_time(1, 1, row["atomic_bsz"], 0, row["num_microbatches"])
        visits = row["num_microbatches"] * row["num_stages"]
        lines.append(np.array([step.accum_time, visits]) / row["accum_step_time"])
    return Correction(*scipy.optimize.nnls(np.array(lines), np.ones(len(lines)))[0].tolist())


def unseen_stages(rows: Sequence[Row], layers: Sequence[Row]) -> Iterator[tuple[str, int, Errors]]:
    """Predict each K from the layers, without and with corrections from jobs with fewer stages."""
    counts = sorted({row["num_stages"] for row in rows})
    if not layers or counts[0] != 1:
        return
    profile = profile_of(layers)
    base = fit([row for row in rows if row["num_stages"] == 1])
    for num_seen in range(len(counts)):
        seen = [row for row in rows if row["num_stages"] in counts[:num_seen]]
        known = correction(profile, seen, base) if seen else Correction()
        names = " and ".join(f"K = {k}" for k in counts[:num_seen])
        name = f"layers, corrected by {names}" if seen else "layers alone"
        for num_stages in counts[max(num_seen, 1) :]:
            there = [row for row in rows if row["num_stages"] == num_stages]
            params = known.apply(price(profile, there[0], base))
            yield name, num_stages, errors(params, there)


# --- what is printed ----------------------------------------------------------------------------


def table(rows: Sequence[Row], layers: Sequence[Row]) -> Iterator[str]:
    yield "| fitted | K | predictions | accumulation, mean | worst | optimizer step, mean | worst |"
    yield "|---|---|---|---|---|---|---|"
    by_stages: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_stages[row["num_stages"]].append(row)
    for split in SPLITS:
        total = Errors([], [])
        for num_stages, there in sorted(by_stages.items()):
            found = errors_of(split, there)
            for sums, values in zip(total, found, strict=True):
                sums.extend(values)
            yield from line(split.name, num_stages, found)
        yield from line(f"**{split.name}**", "all", total)
    for name, num_stages, found in unseen_stages(rows, layers):
        yield from line(name, num_stages, found)


def line(name: str, num_stages: int | str, found: Errors) -> Iterator[str]:
    if found.accum:
        percent = [f"{100 * f(e):.1f} %" for e in found for f in (np.mean, np.max)]
        yield f"| {name} | {num_stages} | {len(found.accum)} | {' | '.join(percent)} |"


def parameters(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "| K | "
        + " | ".join(names := [*PerfParams._fields[:7], "overlap", "contention", "overhead"])
        + " |"
    )
    yield "|---" * (len(names) + 1) + "|"
    for num_stages in sorted({row["num_stages"] for row in rows}):
        params = fit([row for row in rows if row["num_stages"] == num_stages])
        values = (f"{getattr(params, name):.3g}" for name in names)
        yield f"| {num_stages} | {' | '.join(values)} |"


def separate(rows: Sequence[Row]) -> list[Row]:
    """The rows with accumulation steps only in `accum_step_time`.

    The library counts optimizer steps, without the wait for other replicas, among them.
    """
    result = []
    for row in rows:
        alone = [s["step"] for s in row["steps"] if not s["optimizer"]]
        result.append({**row, "accum_step_time": float(np.median(alone))} if alone else row)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured step times.")
    parser.add_argument("rows", type=Path, help="what measure.py wrote")
    parser.add_argument(
        "--separate", action="store_true", help="take accumulation steps alone for theirs"
    )
    args = parser.parse_args()
    entries = [json.loads(text) for text in args.rows.read_text().splitlines()]
    rows = [entry for entry in entries if entry.get("kind") != "layer"]
    layers = [entry for entry in entries if entry.get("kind") == "layer"]
    if args.separate:
        rows = separate(rows)
    print("\n".join(table(rows, layers)))
    print()
    print("\n".join(parameters(rows)))


if __name__ == "__main__":
    main()
