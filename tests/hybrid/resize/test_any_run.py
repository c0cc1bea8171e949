"""Runs of any shape, whose replicas come, go and die anywhere: hypothesis draws them.

Of every run: every sample is taken once in every loop of every epoch, all replicas are equal before
and after every step, what was void begins again as it did before, accumulators are exact, every
replica ends as it is to, and those are left that are to be.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.extent import examples
from tests.hybrid.resize.any_job import AnyJob
from tests.hybrid.resize.any_plan import LoopPlace, RunEvent, RunOperation, RunPlan

POINTS = ["forward", "backward", "between", "step", "after", "outside", "syncing", "forming"]
SCHEDULES = ["1f1b", "gpipe", "interleaved"]
LOOPS = [
    *[("train",), ("train", "again"), ("train", "evaluate"), ("other", "evaluate", "train")],
    *[("partly", "evaluate"), ("other", "partly", "again")],
]


def draw_plan(draw: random.Random) -> RunPlan:
    """Return a run of any shape."""
    batch_size = draw.randint(1, 9)
    size = max(draw.randint(1, 9) * batch_size + draw.randint(-2, 3), 1)
    replicas, accumulation = draw.choice([1, 2, 2, 3, 3]), draw.randint(1, 3)
    adaptive = draw.random() < 0.5
    largest = max(-(-batch_size // (replicas * accumulation)), 1) if adaptive else 0
    loops, epochs = draw.choice(LOOPS), draw.randint(1, 2)
    places = sorted(
        LoopPlace(
            draw.randrange(epochs),
            draw.randrange(len(loops)),
            draw.choice([0, draw.randrange(size)]),
        )
        for _ in range(draw.randint(1, 5))
    )
    stages, schedule = draw.choice([(1, ""), (2, ""), (2, draw.choice(SCHEDULES))])
    crew = Crew(draw, replicas, largest, "partly" not in loops, stages if schedule else 1)
    return RunPlan(
        replicas=replicas,
        kind=draw.choice(["indices", "indices", "text", "stream"]),
        size=size,
        batch_size=batch_size,
        shuffle=draw.random() < 0.5,
        largest=largest,
        loops=loops,
        epochs=epochs,
        stages=stages,
        microbatches=draw.randint(0, 4),
        schedule=schedule,
        saves=draw.choice(["no", "no", "yes", "background"]),
        events=tuple(
            RunEvent(
                place=place,
                operations=tuple(crew.operation() for _ in range(draw.choice([1, 1, 2]))),
                waits=draw.random() < 0.7,
                settles=draw.random() < 0.6,
            )
            for place in places
        ),
        over=draw.choice(["gloo", "stand-in"]),
    )


class Crew:
    """Draws who comes, goes and dies.

    Args:
        draw: Where chance comes from.
        count: Replicas at first.
        largest: Samples that a replica takes at once; 0: the batch size is fixed.
        mortal: Whether replicas may die: in a loop that is left by `break` nobody can go on.
        processes: Of each replica.
    """

    def __init__(
        self, draw: random.Random, count: int, largest: int, mortal: bool, processes: int
    ) -> None:
        self._draw, self._count, self._largest = draw, count, largest
        self._mortal, self._processes = mortal, processes

    def operation(self) -> RunOperation:
        """Return what happens next."""
        draw, kinds = self._draw, ["joins"] * (5 - self._count)
        if self._count > 1:
            kinds += [*["leaves"] * self._count, *["dies"] * self._count * self._mortal]
        kind = draw.choice([*kinds, *["reshapes"] * (self._largest > 0)])
        if kind == "joins":
            # One that dies before it takes part is missed some seconds later only.
            point = draw.choice([*[""] * 18, "waiting_to_join", "formed"])
            self._count += not point
            return RunOperation(kind, point=point, stage=self._stage())
        if kind == "reshapes":
            shape = draw.randint(1, self._largest), draw.randint(0, 2), draw.randint(1, 4)
            return RunOperation(kind, shape=shape)
        self._count -= 1
        rank = draw.randint(0, 3)
        if kind == "leaves":
            return RunOperation(kind, rank)
        late = draw.random() < 0.5
        return RunOperation(kind, rank, draw.choice(POINTS), late=late, stage=self._stage())

    def _stage(self) -> int:
        """Return the stage of the process that dies."""
        return self._draw.randrange(self._processes)


def check(plan: RunPlan, repository: Path) -> list[tuple[int, int]]:
    """Run it; return the first iterations with another number of replicas, and that number."""
    with (
        tempfile.TemporaryDirectory() as folder,
        AnyJob(Path(folder) / "job", repository, plan) as job,
    ):
        try:
            job.run()
            return job.check()
        except AssertionError as error:
            error.add_note(f"{plan}\n{job.told()}")
            raise


# Hypothesis itself would try what is much like what it has tried, and make a failure smaller, at
# seconds a run.
@pytest.mark.exhaustive
@settings(examples(2, 12), phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
def test_every_run_takes_every_sample_once_and_its_replicas_are_equal(
    repository: Path, seed: int
) -> None:
    check(draw_plan(random.Random(seed)), repository)  # noqa: S311  # chance to be repeated
