"""A scheduler one of whose threads has died does not serve on as if nothing were the matter."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from pipollux_sched.utils.vital_thread import VitalThread, VitalThreads
from tests.programs import Forked
from tests.sched.processes import processes_of

SERVE = """
import sys
from pipollux_sched.allocator import {module}
from pipollux_sched.cli import main

class Fault(BaseException):
    pass

def fail(*_):
    raise Fault("out of order")

{module}.{thing} = fail
main(["serve", "--state-dir", sys.argv[1]])
"""
"""`pipollux serve` with a fault that nothing expects in what one of its threads does."""


@pytest.mark.parametrize(
    ("thread", "module", "thing"), [("allocator", "allocator", "AllocationLoop._decide")]
)
def test_a_thread_that_dies_ends_the_process(
    tmp_path: Path, thread: str, module: str, thing: str
) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVE.format(module=module, thing=thing))
    with Forked(script, [str(tmp_path / "s")]) as serving:
        assert serving.wait() == 1
        assert serving.output.startswith("Serving 1 node")
        last = serving.errors.splitlines()[-1]
    assert last == (
        f"Error: the thread pipollux-{thread} has failed (Fault('out of order')), so the scheduler "
        "ends; jobs run on, start it again to manage them"
    )
    assert (tmp_path / "s" / "server.json").exists(), "jobs report to the next one, there"
    assert processes_of(tmp_path / "s") == []


@pytest.mark.exhaustive
def test_how_threads_end() -> None:
    ending, wake = Event(), Event()
    threads = VitalThreads(ending)
    over = VitalThread("brief", lambda: None)
    with ExitStack() as resources:
        threads.start(resources, "long", lambda: (ending.wait(240), None)[1], wake)
        threads.watch(over)
        assert threads.failure is None, "one that has not begun has not failed"
        over.start()
        over.join(240)
        assert threads.failure == "the thread pipollux-brief has ended"
    assert wake.is_set()
    assert ending.is_set()
