"""A run of any shape, started and read by tests."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.hybrid.resize.any_plan import Happening, LoopPlace, RunPlan
from tests.hybrid.resize.any_training import CLOSING
from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.nccl_stand_in import STAND_IN
from tests.programs import Forked
from tests.waiting import until

__all__ = ["AnyJob"]

Line = dict[str, Any]
KILLED, BROKEN = -9, 1


class AnyJob(ChangingJob):
    """Replicas that come, go and die as a plan says.

    Args:
        folder: for results and the rendezvous.
        repository: where the tests are.
        plan: what they do.
    """

    script = Path(__file__).with_name("any_training.py")

    def __init__(self, folder: Path, repository: Path, plan: RunPlan) -> None:
        settings = {"PLAN": plan.to_json(), "PROCESSES": str(plan.processes)}
        settings |= STAND_IN if plan.over == "stand-in" else {}
        super().__init__(folder, repository, **settings)
        self.plan = plan
        self.names: dict[str, list[Forked]] = {}
        """The processes of each replica, by stage."""
        self.happened: list[Happening] = []

    def run(self) -> None:
        """Run to the end; start those that join, and have those leave that are to."""
        self.begin(self.plan.replicas)
        for rank in range(self.plan.replicas):
            first = rank * self.processes
            self.names[f"first-{rank}"] = self.programs[first : first + self.processes]
        until(self._go_on, "the end of all replicas")

    def _go_on(self) -> bool:
        for name, programs in self.names.items():
            codes = {program.poll() for program in programs}
            # With one of its processes a replica ends as a whole.
            expected = {None, 0, KILLED, *([BROKEN] if KILLED in codes else [])}
            assert codes <= expected, f"{name} has failed\n{self.told()}"
            if KILLED in codes and None not in codes:
                (self.results / f"gone-{name}").touch()
        path = self.results / f"event-{len(self.happened)}"
        if path.exists():
            happening = Happening.from_json(path.read_text())
            self.happened.append(happening)
            for name in happening.joins:
                self.names[name] = self.add_stages(NAME=name)
            for name in happening.doomed:
                self.names[name] = self.add_stages(NAME=name, DIES=name.rpartition("-")[2])
            for replica in happening.leaves:
                self.rendezvous.ask_to_leave(replica)
        return all(program.poll() is not None for program in self.programs)

    def told(self) -> str:
        """Return what happened, and what the replicas have said."""
        said = [f"{name} {x.poll()}: {x.errors}" for name, y in self.names.items() for x in y]
        return "\n".join([*map(str, self.happened), *said])

    # --- what must be ------------------------------------------------------------------------

    def check(self) -> list[tuple[int, int]]:
        """Check that nothing was lost, doubled, or differs between replicas.

        Returns:
            The first iterations with another number of replicas, and that number.
        """
        stages = [self._check_stage(stage) for stage in range(self.processes)]
        assert all(changes == stages[0] for changes in stages), stages
        return stages[0]

    def _check_stage(self, stage: int) -> list[tuple[int, int]]:
        """Check the processes that run one stage of the replicas."""
        iterations = self._iterations(stage)
        self._check_ends(iterations, stage)
        self._forget_own_decisions(iterations)
        changes: list[tuple[int, int]] = []
        for number, (place, lines) in enumerate(iterations.items()):
            replicas = lines[0]["of"]
            self._check_iteration(place, lines)
            if not changes or changes[-1][1] != replicas:
                changes.append((number, replicas))
        self._check_samples(iterations)
        self._check_steps(iterations, stage)
        assert changes[-1][1] == len(self._expected_members()), changes
        return changes

    def _check_ends(self, iterations: dict[LoopPlace, list[Line]], stage: int) -> None:
        ids = self._ids()
        dead = {path.name.removeprefix("died-") for path in self.results.glob("died-*")}
        assert {replica for x in self.happened for replica in x.dies} >= dead - {
            replica for replica, name in ids.items() for x in self.happened if name in x.doomed
        }
        for replica, name in ids.items():
            codes = sorted(program.poll() for program in self.names[name])
            broken = [KILLED, *[BROKEN] * (self.processes - 1)]
            expected = broken if replica in dead else [0] * self.processes
            assert codes == expected, f"{name} ended otherwise"
        paths = list(self.results.glob(f"ended-*.{stage}"))
        ended = {path.name.removeprefix("ended-").rpartition(".")[0] for path in paths}
        assert ended == self._expected_members()
        if self.plan.accumulates:
            totals = {path.read_text() for path in paths}
            assert [json.loads(text) for text in totals] == [self._totals(iterations)]

    def _expected_members(self) -> set[str]:
        ids = self._ids()
        dead = {path.name.removeprefix("died-") for path in self.results.glob("died-*")}
        left = {replica for x in self.happened for replica in x.leaves}
        return {name for replica, name in ids.items() if replica not in dead | left}

    def _totals(self, iterations: dict[LoopPlace, list[Line]]) -> dict[str, float]:
        """Return what accumulators are to hold."""
        totals: dict[str, float] = defaultdict(float)
        for place, lines in iterations.items():
            loop = self._loops(place.epoch)[place.loop]
            totals[f"{loop}-sum"] += sum(sum(line["numbers"]) for line in lines)
            totals[f"{loop}-count"] += sum(len(line["numbers"]) for line in lines)
        return dict(totals)

    def _loops(self, epoch: int) -> tuple[str, ...]:
        return self.plan.loops if epoch < self.plan.epochs else ("closing",)

    def _ids(self) -> dict[str, str]:
        return {x.name.removeprefix("id-"): x.read_text() for x in self.results.glob("id-*")}

    def lines_of(self, stage: int) -> list[Line]:
        """Return what all replicas wrote of the passes and steps of one stage."""
        files = sorted(self.results.glob(f"log-*.{stage}.jsonl"))
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [{**line, "place": LoopPlace(*line["place"])} for line in found]

    def _iterations(self, stage: int) -> dict[LoopPlace, list[Line]]:
        """Return the passes that count, in order: those of the last membership at each place.

        What was begun in one before was void, or else nobody would have begun it again.
        """
        found: dict[LoopPlace, list[Line]] = defaultdict(list)
        for line in self.lines_of(stage):
            if "done" not in line:
                found[line["place"]].append(line)
        last = {place: max(x["member"] for x in lines) for place, lines in found.items()}
        return {
            place: [line for line in found[place] if line["member"] == last[place]]
            for place in sorted(found)
        }

    def _forget_own_decisions(self, iterations: dict[LoopPlace, list[Line]]) -> None:
        """Leave out random numbers that differ between replicas by design.

        Numbers that all have drawn alike they go on drawing alike. But of one replica by itself it
        is not known that it draws for all: those that join it draw others.
        """
        alone = [place for place, lines in iterations.items() if lines[0]["of"] == 1]
        self._agree_until = min(alone, default=LoopPlace(self.plan.epochs + 1, 0, 0))

    def _same(self, place: LoopPlace) -> tuple[str, ...]:
        """What is the same on all replicas at the beginning of an iteration."""
        return ("step", "digest", *(["decision"] if place <= self._agree_until else []))

    def _check_iteration(self, place: LoopPlace, lines: list[Line]) -> None:
        """Check that all replicas have taken part in it, from the same state."""
        passes = [[x for x in lines if x["pass"] == i] for i in range(len(lines))]
        replicas = lines[0]["of"]
        for group in filter(None, passes):
            assert sorted(x["rank"] for x in group) == list(range(replicas)), (place, group)
            # Within an iteration buffers may differ: its end makes them rank 0's.
            same = self._same(place) if group[0]["pass"] == 0 else ("step",)
            for what in ("of", "shape", "ends", *same):
                assert all(x[what] == group[0][what] for x in group), (place, what, group)
            assert all(x["follows"] for x in group), (place, "hidden states", group)
        assert [group[0]["ends"] for group in passes if group][-1], (place, "it is whole")
        assert sum(x["ends"] for x in lines) == replicas, (place, "it ends once")

    def _check_samples(self, iterations: dict[LoopPlace, list[Line]]) -> None:
        """Check that every sample was taken once in every loop, and positions add up."""
        index: dict[tuple[int, int], int] = defaultdict(int)
        taken: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for place, lines in iterations.items():
            loop = place[:2]
            assert place.index == index[loop], (place, "positions leave something out")
            numbers = [number for line in lines for number in line["numbers"]]
            index[loop] += len(numbers)
            taken[loop].update(numbers)
        for epoch in range(self.plan.epochs + 1):
            for number, loop in enumerate(self._loops(epoch)):
                whole = Counter(range(CLOSING if loop == "closing" else self.plan.size))
                found = taken.pop((epoch, number))
                if loop == "partly":
                    assert found <= whole, (epoch, number, found - whole)
                    assert 2 * found.total() > self.plan.size - 1, (epoch, number, found)
                else:
                    assert found == whole, (epoch, number)
        assert not taken

    def _check_steps(self, iterations: dict[LoopPlace, list[Line]], stage: int) -> None:
        """Check that every step led from one state to another, which all replicas have."""
        done: dict[LoopPlace, list[Line]] = defaultdict(list)
        begun: dict[LoopPlace, list[Line]] = defaultdict(list)
        for line in self.lines_of(stage):
            (done if "done" in line else begun)[line["place"]].append(line)
        places = list(iterations)
        for place, following in zip(places, [*places[1:], None], strict=True):
            starts = [x for x in begun[place] if x["pass"] == 0]
            # Also those whose iteration was void: what is done again begins as it did before.
            for what in self._same(place):
                assert len({str(x[what]) for x in starts}) == 1, (place, what, starts)
            last = iterations[place][0]
            states = [x["done"] for x in done[place] if x["member"] == last["member"]]
            if self._loops(place.epoch)[place.loop] == "evaluate":
                states = [last["digest"]]
            elif following is None or iterations[following][0]["member"] == last["member"]:
                assert len(states) == last["of"], (place, "not all have done it")
            assert states, (place, "nobody has done it")
            after = states if following is None else [*states, iterations[following][0]["digest"]]
            assert len({str(x) for x in after}) == 1, (place, after)
