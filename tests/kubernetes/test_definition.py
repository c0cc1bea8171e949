"""The custom resource of a job says what a job file can say, and stays what it was created as."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.types import PatchType

from pipollux_sched.backend.kubernetes.api import Job
from pipollux_sched.backend.kubernetes.definition import MUTABLE, definition_file
from pipollux_sched.backend.kubernetes.job_resource import (
    ignored_change,
    job_spec,
    resource_spec,
    view_job,
)
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.teams import TeamsSpec
from tests.extent import first

from .cluster import IMAGE
from .engines import RUNS
from .memory.cluster import MemoryCluster
from .test_resources import CRD, Site

FIELDS: dict[str, tuple[Any, Any]] = {
    "script": ("/app/train.py", "/app/other.py"),
    "image": ("registry.example/train:1", "registry.example/train:2"),
    "family": ("resnet", ""),
    "args": (["--epochs", "3"], ["--epochs", "4"]),
    "notify": (
        [{"channel": "ops", "events": ["failed"]}],
        [{"channel": "ops", "events": ["completed"]}],
    ),
    "after": ([{"job": "prepare", "when": "ended"}], [{"job": "prepare", "when": "failed"}]),
    "num_stages": (2, 4),
    "servers": (1, 2),
    "stage_choices": ([1, 2, 4], [2, 4]),
    "process_per_stage": (True, False),
    "num_microbatches": (4, 8),
    "min_replicas": (2, 3),
    "max_replicas": (8, 9),
    "requested_replicas": (3, 4),
    "gpu_type": ("a100", "h100"),
    "device": ("gpu", "cpu"),
    "preemptible": (False, True),
    "team": ("vision", "text"),
    "user": ("ana@example.org", "bo"),
    "priority": ("urgent", "patient"),
    "resources": ({"cpus": 2, "memory": "8GiB"}, {"cpus": 2, "memory": "9GiB"}),
    "resources_per_stage": ({"cpus": 1, "memory": 5}, {"cpus": 2}),
    "environment": ({"MY_SEED": "1"}, {"MY_SEED": "2"}),
    "working_dir": ("/app", "/data"),
    "checkpoint_dir": ("/data/a", "/data/b"),
    "max_restarts": (0, 1),
    "python": ("/opt/env/bin/python", "/opt/env/bin/python3"),
    "exit_codes": ({"fail": [2], "ignore": [75]}, {"fail": [3]}),
    "memory_limit": ("12GiB", 2**34),
    "max_run_time": ("12h", 60),
    "deadline": ("36h", 3600),
    "start_timeout": ("2h", 90),
    "hang_timeout": ("90.5s", "2m"),
    "run_as": ("nobody", "daemon"),
    "hints": ({"initBatchSize": 32, "numStages": 2}, {"initBatchSize": 64, "numStages": 2}),
}
"""Two values of each field of a job file, neither of them the default where there is a third."""
WHOLE = parse_job({"name": "whole", **{name: first for name, (first, _) in FIELDS.items()}})


@pytest.fixture
def client(memory: MemoryCluster) -> Iterator[Client]:
    memory.declare(CRD)
    with memory.client("default") as client:
        yield client


def camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def create(client: Client, name: str, **fields: Any) -> Any:
    given = {camel(field): copy.deepcopy(value) for field, value in fields.items()}
    return client.create(Job(metadata={"name": name}, spec=given))


def refusal(client: Client, name: str, **spec: Any) -> str:
    """Return why a resource cannot be changed so."""
    with pytest.raises(ApiError) as refused:
        client.patch(Job, name, {"spec": spec}, patch_type=PatchType.MERGE)
    return str(refused.value.status.message)


def test_the_file_is_the_one_that_is_generated() -> None:
    assert CRD.read_text() == definition_file(), (
        "write it anew: python -m pipollux_sched.backend.kubernetes.definition > " + str(CRD)
    )


def test_all_fields_of_a_job_file_have_values_here() -> None:
    others = {"module", "command"}  # in place of a script
    assert (
        set(FIELDS) == set(JobSpec.model_fields) - {"name", "allocation", "sweep"} - others
    )  # which has tests of its own


SWEEPS: dict[str, Any] = {
    "grid": {
        "grid": {"lr_max": [0.1, 1], "kind": ["a", True]},
        "metric": "error",
        "max_parallel": 3,
    },
    "list": {"list": [{"a_b": 1}, {"a_b": 2}], "max_replicas": 5, "pruner": "median", "warmup": 2},
    "search": {
        "search": {
            "lr_max": {"low": 1e-3, "high": 1.0, "log": True},
            "width": {"low": 8, "high": 64, "step": 8},
            "share": {"low": 1.0, "high": 2.0},
            "kind": {"choices": ["a", 2]},
        },
        "trials": 9,
        "sampler": "random",
        "seed": 4,
        "direction": "maximize",
    },
}


@pytest.mark.parametrize("kind", SWEEPS)
def test_a_sweep_is_said_by_a_resource(client: Client, kind: str) -> None:
    """As its user writes it, and as a job is given one: names of parameters stay as they are."""
    fields = {"name": "s", "image": IMAGE, "script": "/a.py", "args": ["{{x}}"]}
    spec = parse_job({**fields, "sweep": SWEEPS[kind]})
    client.create(Job(metadata={"name": "s"}, spec=resource_spec(spec.revealed())))
    kept = client.get(Job, "s").to_dict()
    found = job_spec(view_job(kept))
    assert found == spec
    assert found.sweep is not None
    if kind == "search":  # equal numbers need not be equal ranges
        whole = {name: entry.is_whole for name, entry in found.sweep.search.items()}
        assert whole == {"lr_max": False, "width": True, "share": False, "kind": False}
    words = "sweep of a job cannot be changed; delete the job, and create it again"
    assert words in refusal(client, "s", sweep={"metric": "other"})
    assert words in refusal(client, "s", sweep=None)


def test_what_is_wrong_in_a_sweep_is_told_by_the_scheduler() -> None:
    for sweep, words in (
        ({"search": {"lr": {"low": "small", "high": 1}}, "trials": 2}, "sweep.search.lr.low"),
        ({"search": [1], "trials": 2}, "sweep.search"),
        ({"grid": {"lr": []}}, "sweep.grid.lr: has no values"),
        ({"maxParallel": 2}, "sweep: has no parameters"),
    ):
        given = {"script": "/a.py", "image": IMAGE, "sweep": sweep}
        with pytest.raises(SpecError) as refused:
            job_spec(view_job({"metadata": {"name": "s"}, "spec": given}))
        assert words in str(refused.value)


def test_a_module_or_a_command_in_place_of_a_script(client: Client) -> None:
    image = "registry.example/train:1"
    for number, given in enumerate(({"module": "package.train"}, {"command": "./train.sh && x"})):
        create(client, f"job-{number}", image=image, **given)
        kept = client.get(Job, f"job-{number}").to_dict()
        assert job_spec(view_job(kept)) == parse_job(
            {"name": f"job-{number}", "image": image, **given}
        )
    with pytest.raises(ApiError, match="script is missing"):
        create(client, "none", image=image)


def test_what_a_job_file_says_a_resource_says(client: Client) -> None:
    """Nothing is lost on the way to a resource and back, nor pruned by the API server."""
    spec = WHOLE.revealed()
    client.create(Job(metadata={"name": "whole"}, spec=resource_spec(spec)))
    kept = client.get(Job, "whole").to_dict()
    assert job_spec(view_job(kept)) == WHOLE


def test_the_job_file_of_a_user_is_a_resource(client: Client) -> None:
    """Sizes and durations may have units here, too."""
    kept = create(client, "whole", **{name: first for name, (first, _) in FIELDS.items()})
    assert job_spec(view_job(kept.to_dict())) == WHOLE


@pytest.mark.parametrize("third", first(1, range(3)))
def test_no_field_can_be_changed(client: Client, third: int) -> None:
    """Neither changed nor removed nor added: the job that runs would not be the one it shows."""
    create(client, "whole", **{name: first for name, (first, _) in FIELDS.items()})
    create(client, "least", script="/app/a.py", template={})
    for field, (value, other) in list(FIELDS.items())[third::3]:
        name = camel(field)
        words = f"{name} of a job cannot be changed; delete the job, and create it again"
        assert words in refusal(client, "whole", **{name: other})
        assert words in refusal(client, "least", **{name: value})
        if field != "script":
            assert words in refusal(client, "whole", **{name: None})


def test_what_can_be_changed(client: Client) -> None:
    create(client, "alpha", script="/app/a.py", image=IMAGE)
    values: dict[str, Any] = {"suspend": True, "template": {"metadata": {"labels": {"a": "b"}}}}
    assert set(values) == set(MUTABLE)
    for field, value in values.items():
        client.patch(Job, "alpha", {"spec": {field: value}}, patch_type=PatchType.MERGE)
    kept = client.get(Job, "alpha").to_dict()["spec"]
    assert {field: kept[field] for field in values} == values


def test_what_the_api_server_refuses_at_once(client: Client) -> None:
    for fields, words in (
        ({"minReplicas": 65}, "minReplicas must not be more than maxReplicas"),
        ({"minReplicas": 3, "requestedReplicas": 2}, "requestedReplicas must not be less"),
        ({"maxReplicas": 3, "requestedReplicas": 4}, "requestedReplicas must not be more"),
        ({"numStages": 2, "stageChoices": [1, 4]}, "stageChoices must contain numStages"),
        ({"team": "No Team"}, "spec.team in body should match"),
        ({"user": "-"}, "spec.user in body should match"),
        ({"priority": ""}, "spec.priority in body should be at least 1 chars long"),
        ({"processPerStage": "yes"}, "spec.processPerStage in body must be of type boolean"),
        ({"script": "a" * 5000}, "Too long"),
        ({"image": None}, "image is missing"),
    ):
        spec = {"script": "/app/a.py", "image": IMAGE, **fields}
        given = {name: value for name, value in spec.items() if value is not None}
        with pytest.raises(ApiError, match=words):
            client.create(Job(metadata={"name": "alpha"}, spec=given))
        if "image" in given:
            # `JobSpec` refuses it, too: a job that was accepted over REST can get its resource.
            with pytest.raises(SpecError):
                job_spec(view_job({"metadata": {"name": "alpha"}, "spec": given}))


def test_a_change_that_an_api_server_without_rules_lets_through() -> None:
    """The job stays as it is, and its status says which fields do not count."""
    spec = parse_job({"name": "alpha", "script": "/app/a.py", "image": IMAGE, "deadline": "1h"})
    kept = spec.model_dump(mode="json") | {"team": "text"}  # it was moved there

    def told(**fields: Any) -> str | None:
        given = resource_spec(spec.model_dump(mode="json")) | {"team": "vision", **fields}
        resource = view_job({"metadata": {"name": "alpha"}, "spec": given})
        found = ignored_change(resource, kept, 1.0)
        return None if found is None else str(found["message"])

    assert told() is None
    assert told(suspend=True, template={"spec": {}}, deadline="60m") is None
    assert told(numStages=2, args=["--fast"]) == (
        "The job stays as it was submitted: args, numStages cannot be changed; delete the job, and "
        "create it again."
    )
    assert "min_replicas" in str(told(minReplicas=65))


def test_team_and_priority_of_a_resource(
    memory: MemoryCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as those of a job file do: the job's quota, and a refusal of what is not there."""
    monkeypatch.setenv("KUBECONFIG", str(memory.kubeconfig))
    site = Site(memory, "default", tmp_path / "site")
    teams = {
        "teams": [{"name": "vision", "quota": 2, "users": ["ana"]}, {"name": "text"}],
        "priorities": [{"name": "urgent", "value": 100}],
    }
    site.scheduler.control.set_teams(TeamsSpec.model_validate(teams))
    site.apply("alpha", RUNS, team="vision", user="ana", priority="urgent", maxReplicas=1)
    site.apply("beta", RUNS, team="sound")
    site.apply("gamma", RUNS, team="vision", user="bo")
    status = site.await_phase("alpha", Phase.RUNNING)
    assert status["team"] == "vision"
    job = parse_job(site.scheduler.store.job("alpha").spec)
    assert (job.team, job.user, job.priority) == ("vision", "ana", "urgent")
    assert "team: 'sound' is not known" in site.await_phase("beta", Phase.FAILED)["message"]
    assert "bo is not in team 'vision'" in site.await_phase("gamma", Phase.FAILED)["message"]
    site.close()
