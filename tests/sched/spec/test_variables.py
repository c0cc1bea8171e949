"""The environment that users give their jobs: what it may hold, and who gets to see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipollux_sched.backend.replica.inherited import inherited
from pipollux_sched.cli.app import app
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.variables import TOTAL_LIMIT, VALUE_LIMIT, is_reserved
from tests.sched.supervised import SCRIPT, Service

RESERVED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("PIPOLLUX_TOKEN", "PIPOLLUX_STORE", "TORCHELASTIC_RUN_ID", "PET_NNODES"),
    *("PIPOLLUX_ELASTIC", "PIPOLLUX_RENDEZVOUS", "PIPOLLUX_DEVICES"),
    *("CUDA_VISIBLE_DEVICES", "PYTHON_EXEC", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
)


@pytest.mark.parametrize("name", RESERVED)
def test_what_the_scheduler_sets_is_refused(name: str) -> None:
    assert is_reserved(name)
    with pytest.raises(SpecError) as refused:
        parse_job({"name": "toy", "script": SCRIPT, "environment": {name: "1"}})
    sentence = f"job: environment: '{name}' is set by the scheduler; remove it here"
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    "name", ["PIPOLLUX_ELASTIC_NCCL", "PIPOLLUX_TIMEOUT", "PIPOLLUX_TRACE_DIR"]
)
def test_what_only_users_set_is_allowed(name: str) -> None:
    assert not is_reserved(name)
    job = parse_job({"name": "toy", "script": SCRIPT, "environment": {name: "1"}})
    assert job.environment == {name: "1"}
    assert name not in inherited({name: "1"})
    assert inherited({name: "1"}, [name]) == {name: "1"}


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"A=B": "x"}, "'A=B' is not a variable's name"),
        ({"": "x"}, "'' is not a variable's name"),
        ({"KEY": "hunter2\0"}, "'KEY' has a value that no variable can have: remove U+0000"),
        ({"KEY": "hunter2\ud800"}, "'KEY' has a value that no variable can have"),
        ({"KEY": "hunter2" * VALUE_LIMIT}, f"at most {VALUE_LIMIT} are allowed"),
        (
            {f"KEY_{i}": "hunter2" * 4000 for i in range(20)},
            f"names and values have 560110 characters; at most {TOTAL_LIMIT} are allowed",
        ),
    ],
)
def test_what_no_process_can_be_given_is_refused(environment: dict[str, str], says: str) -> None:
    """In one sentence, which holds no value: it may be secret."""
    with pytest.raises(SpecError) as refused:
        parse_job({"name": "toy", "script": SCRIPT, "environment": environment})
    assert says in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "state") as service:
        yield service


def test_values_are_shown_to_nobody(service: Service) -> None:
    """Neither by REST nor in the log of events; the job's processes get them."""
    given = {"WANDB_API_KEY": "hunter2", "SEED": "3"}
    job = service.submit("toy", environment=given)
    told = service.admin.get("/jobs/toy").json()["spec"]
    assert told["environment"] == ["SEED", "WANDB_API_KEY"]
    for path in ("/jobs", "/jobs/toy", "/events?limit=100", "/overview", "/jobs/toy/explanation"):
        answer = service.admin.get(path)
        answer.raise_for_status()
        assert "hunter2" not in answer.text
    assert job.get("/jobs/toy").status_code in (401, 403)
    assert "hunter2" not in str(service.store.events())
    assert parse_job(service.store.job("toy").spec).environment == given
    with pytest.raises(SpecError, match="environment: "):
        parse_job(told)  # what is shown is not taken for the whole


def test_what_an_operator_may_hand_on() -> None:
    for name in ("PIPOLLUX_STORE", "A B"):
        result = CliRunner().invoke(app, ["serve", "--pass-environment", name])
        assert result.exit_code == 2
        assert f"'{name}'" in result.output
    assert JobSpec(name="toy", script=SCRIPT, environment={"HF_TOKEN": "x"}).environment
