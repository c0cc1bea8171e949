"""Both engines on a GPU: gradients and parameters are the plain model's on the CPU."""

from __future__ import annotations

import pytest

from tests.extent import pairs
from tests.gpu.sharing import ON_THE_GPU
from tests.hybrid.stage_processes.test_deaths import check_that_others_end
from tests.hybrid.stage_processes.test_tied import check as check_tied
from tests.hybrid.stage_processes.test_transparency import AXES, FEW, Case, check
from tests.hybrid.stage_processes.tied import Job
from tests.hybrid.test_transparency import FAMILIES, PAIRS, check_all

pytestmark = pytest.mark.gpu
BACKENDS = ("gloo", "nccl")
CASES = [Case(*case) for case in pairs(*AXES)]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_for_all_stages(name: str) -> None:
    check_all(name, 1, PAIRS, environment=ON_THE_GPU)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_replicas_of_one_process(name: str, backend: str) -> None:
    check_all(name, 2, PAIRS[::3], backend, ON_THE_GPU)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["transformer", "convolutional"])
def test_a_process_for_each_stage(name: str, backend: str) -> None:
    check(name, 1, 2, CASES, False, backend, ON_THE_GPU)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_of_two_processes(backend: str) -> None:
    check("mlp", 2, 2, FEW, True, backend, ON_THE_GPU)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stages_that_share_a_parameter(backend: str) -> None:
    job = Job("language", [2, 3], "1f1b", 1, adam=True, backend=backend)
    check_tied(2, job, environment=ON_THE_GPU)


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_that_divide_the_optimizer_state(backend: str) -> None:
    check("mlp", 2, 2, [FEW[0]._replace(sharded=True)], True, backend, ON_THE_GPU)


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_who_waits_for_a_process_that_died_ends(victim: int, backend: str) -> None:
    check_that_others_end(victim, "1f1b", backend, ON_THE_GPU)
