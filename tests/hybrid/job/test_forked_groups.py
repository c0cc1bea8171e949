"""Groups that are garbage when a process forks, as one does that starts workers of a loader."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.programs import Forked

SCRIPT = """
import gc, os, signal, sys, warnings
import torch
import torch.distributed as dist
from pipollux_hybrid.job.groups import form_group

warnings.simplefilter("error")
gc.disable()
store = dist.FileStore(sys.argv[1], 1)
group = form_group(store, "one", 0, 1, patience=10.0, timeout=10.0)
group.all_reduce(torch.ones(1))  # so that its threads wait
garbage = [group]
garbage.append(garbage)
del garbage, group
child = os.fork()
if child == 0:
    signal.alarm(120)  # which ends it
    gc.collect()
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_process_does_not_wait_for_threads_of_its_parents(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Forked(script, [str(tmp_path / "store")]) as program:
        assert (program.wait(), program.errors) == (0, "")
