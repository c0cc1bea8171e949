"""The demo's two jobs on two real kubelets: start, grow over nodes, shrink, grow, complete.

    sudo PIPOLLUX_KUBERNETES=… python benchmarks/clusters/kubernetes_demo.py [--share 1.0]

Prints the events by time; exits with status 1 if one is wrong. Each node has as many slots as this
machine has cores; the demo is designed for two.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import yaml
from counted import fault  # same folder
from kubernetes_site import ROOT, Site, end_in_order  # same folder

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import AttemptRecord
from tests.kubernetes.harness.control_plane import ControlPlane

COUNTED = Path(__file__).with_name("counted.py")
EXAMPLES = ROOT / "examples"
STEPS_ALONE = 60
"""Steps of the first job on both nodes before the second one arrives."""
LAST = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="of the demo's work")
    options = parser.parse_args()
    end_in_order()
    with ControlPlane(nodes=2) as cluster:
        site = Site(
            cluster,
            *("--device-resource", "cpu", "--interval", "10", "--hints-interval", "5"),
            *("--checkpoint-interval", "20", "--grace", "20"),
        )
        try:
            wrong = Demo(site, options.share).run()
        except BaseException:  # also Ctrl-C: keep the logs
            kept = Path(tempfile.mkdtemp(prefix="pipollux-kubernetes-demo-"))
            shutil.copytree(site.directory.path, kept / "state")
            shutil.copy(site.log, kept)
            print(f"state and log of the scheduler are kept in {kept}", file=sys.stderr)
            raise
        finally:
            site.close()
    print("\n".join(f"WRONG: {sentence}" for sentence in wrong) or "All as it must be.")
    sys.exit(bool(wrong))


class Demo:
    """One run of the two jobs, with `share` of the demo's work."""

    def __init__(self, site: Site, share: float) -> None:
        self._site, self._share = site, share
        self._epochs: dict[str, int] = {}
        self._shown: dict[str, object] = {}
        self._begun = time.monotonic()

    def run(self) -> list[str]:
        """Run both jobs to their end; return errors."""
        first, second = yaml.safe_load((EXAMPLES / "demo-jobs.yaml").read_text())["jobs"]
        self._submit(first)
        self._watch("the first job trains on both nodes", lambda: self._alone(first["name"]))
        self._submit(second)
        self._watch("both jobs have ended", lambda: not self._site.under_way())
        self._site.until("no pod is left", lambda: not self._site.pods(), 60.0)
        return [*self._wrong(), *self._wrong_story(first["name"], second["name"])]

    def _submit(self, job: dict[str, Any]) -> None:
        given = [str(word) for word in job["args"]]
        amounts = dict(zip(given[::2], given[1::2], strict=True))
        name = "--characters" if "--characters" in amounts else "--epochs"
        amounts[name] = str(max(1, round(int(amounts[name]) * self._share)))
        self._epochs[str(job["name"])] = int(amounts["--epochs"])
        args = [word for pair in amounts.items() for word in pair]
        fields = {
            "numStages": job.get("num_stages", 1),
            "maxReplicas": job["max_replicas"],
        }
        if "num_microbatches" in job:
            fields["numMicrobatches"] = job["num_microbatches"]
        script = str(EXAMPLES / str(job["script"]))
        self._site.apply(str(job["name"]), COUNTED, [script, *args], **fields)
        self._say(f"{job['name']} is submitted")

    def _alone(self, name: str) -> bool:
        """Whether the first job has trained for a while on two nodes."""
        attempts = self._site.store.attempts(name)
        last = attempts[-1] if attempts else None
        if last is None or len(set(last.nodes)) < 2 or last.first_step is None:
            return False
        points = self._site.store.overview.points(name, 10)
        return bool(points) and points[-1].step - last.first_step >= STEPS_ALONE * self._share

    def _watch(self, what: str, done: Callable[[], bool]) -> None:
        def look() -> bool:
            for name, job in self._site.jobs().items():
                now = (job.phase.value, tuple(job.state.running_on), job.state.reason)
                if self._shown.get(name) != now:
                    self._shown[name] = now
                    where = " ".join(job.state.running_on) or "no node"
                    points = self._site.store.overview.points(name, 1)
                    loss = points[-1].loss if points else None
                    more = "" if loss is None else f", step {points[-1].step}, loss {loss:.3f}"
                    self._say(
                        f"{name}: {now[0]} ({now[2]}), attempt {job.state.attempt} on {where}{more}"
                    )
            return done()

        self._site.until(what, look, LAST)

    def _say(self, sentence: str) -> None:
        print(f"{time.monotonic() - self._begun:6.1f} s  {sentence}", flush=True)

    def _wrong(self) -> list[str]:
        """Return violations of what must hold for each job after any decision."""
        wrong = []
        for name, job in self._site.jobs().items():
            if job.phase is not Phase.COMPLETE:
                wrong.append(f"{name} is {job.phase.value}: {job.state.reason}")
                continue
            if missing := fault(self._site.checkpoints(name), self._epochs[name]):
                wrong.append(f"{name}: {missing}")
            wrong += self._rising(name)
        return wrong

    def _rising(self, name: str) -> list[str]:
        """Return errors unless the loss falls, and no attempt begins at the initial loss."""
        points = [p for p in self._site.store.overview.points(name, 10_000) if p.loss is not None]
        attempts = self._site.store.attempts(name)
        starts = [g.first_step for g in attempts if g.first_step is not None]
        parts = [
            [p.loss for p in points if begin <= p.step < end]
            for begin, end in zip(starts, [*starts[1:], sys.maxsize], strict=True)
        ]
        means = [_mean(part[-10:]) for part in parts if part]
        first, last = _mean([p.loss for p in points[:3]]), means[-1]
        told = ", ".join(f"{part[0]:.3f} to {part[-1]:.3f}" for part in parts if part)
        self._say(f"{name}: loss by attempt {told}")
        steps = [p.step for p in points]
        wrong = [] if last < 0.8 * first else [f"{name}: loss {first:.3f} has become {last:.3f}"]
        wrong += [
            f"{name}: loss {part[0]:.3f} after a restart, as at the beginning"
            for part in parts[1:]
            if part and _mean(part[:3]) > 0.9 * first
        ]
        return wrong if steps == sorted(steps) else [*wrong, f"{name}: steps out of order"]

    def _wrong_story(self, first: str, second: str) -> list[str]:
        """Return errors unless the first job had two nodes, one, then two, and the second ran."""
        sizes = [_size(g) for g in self._site.store.attempts(first) if g.first_step is not None]
        wanted = [2, 1, 2]
        rest = iter(sizes)
        told = all(size in rest for size in wanted)
        self._say(f"{first}: replicas by attempt {sizes}")
        with_both = any(g.first_step is not None for g in self._site.store.attempts(second))
        wrong = [] if told else [f"{first} had {sizes} replicas, and not 2, 1 and 2 again"]
        return wrong if with_both else [*wrong, f"{second} has not trained"]


def _size(attempt: AttemptRecord) -> int:
    return len(attempt.nodes)


def _mean(losses: list[float | None]) -> float:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known)


if __name__ == "__main__":
    main()
