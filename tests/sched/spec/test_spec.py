"""Files and JSON about clusters and jobs: what is taken, and what is said of the rest."""
# ruff: noqa: E501  # the sentences that users read are easier to judge unbroken

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pipollux_perfmodel import SchedHints
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec, load_cluster
from pipollux_sched.spec.job import JobBatch, JobSpec, SpecError, load_jobs, parse_job
from pipollux_sched.spec.script import resolve_script, with_script_found
from pipollux_sched.spec.teams import TeamsSpec, parse_teams
from pipollux_sched.spec.tokens import NewToken
from pipollux_utils.allowed_values import Spot
from pipollux_utils.validation import closest
from tests.extent import examples

NODE = "nodes:\n- name: a\n  slots: 4\n"


def cluster_error(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_cluster(path)
    return str(caught.value).replace(str(path), "cluster.yaml")


def jobs_error(folder: Path, *lines: str) -> str:
    """The complaint about a file with one job, given by lines after its name and script."""
    path = folder / "jobs.yaml"
    path.write_text("\n".join(["jobs:", "- name: a", "  script: a.py", *("  " + x for x in lines)]))
    with pytest.raises(SpecError) as caught:
        load_jobs(path)
    return str(caught.value).replace(str(path), "jobs.yaml")


def test_a_cluster_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(NODE + "  cpus: 8\n  memory: 1.5GiB\n- {name: b, slots: 1, kind: cpu}\n")
    assert load_cluster(path) == ClusterSpec(
        nodes=(
            NodeSpec(name="a", slots=4, cpus=8, memory=3 * 2**29),
            NodeSpec(name="b", slots=1, kind="cpu"),
        )
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "nodes:\n- name: a\n  slot: 4\n",
            "cluster.yaml:3: nodes[0].slot: unknown field; did you mean 'slots'?",
        ),
        (
            NODE + "- name: b\n  slots: -2\n",
            "cluster.yaml:5: nodes[1].slots: -2 is not allowed; "
            "it must be a whole number of at least 1",
        ),
        (
            "nodes:\n- name: a\n  slots: true\n",
            "cluster.yaml:3: nodes[0].slots: true is not allowed; "
            "it must be a whole number of at least 1",
        ),
        (
            "nodes:\n- name: a\n  slots: 2.5\n",
            "cluster.yaml:3: nodes[0].slots: 2.5 is not allowed; "
            "it must be a whole number of at least 1",
        ),
        (
            "nodes:\n- name: a\n  slots:\n",
            "cluster.yaml:3: nodes[0].slots: an empty value is not allowed; "
            "it must be a whole number of at least 1",
        ),
        (
            "nodes:\n- name: a\n",
            "cluster.yaml:2: nodes[0].slots: is missing; give a whole number of at least 1",
        ),
        (NODE + "  kind: tpu\n", "cluster.yaml:4: nodes[0].kind: \"tpu\" is not allowed; it must be 'gpu' or 'cpu'"),
        (
            NODE + "  memory: lots\n",
            "cluster.yaml:4: nodes[0].memory: 'lots' is not a size; "
            "give bytes, or a text such as 8GiB or 500MB",
        ),
        (NODE + "  memory: -1\n", "cluster.yaml:4: nodes[0].memory: -1 is not a size; give bytes, or a text such as 8GiB or 500MB"),
        (
            NODE + "  colour: red\n",
            "cluster.yaml:4: nodes[0].colour: unknown field; "
            "choose from name, slots, kind, cpus, memory, preemptible, gpu_type, draining, cpu_slots, beside, single_stage, topology",
        ),
        (NODE + NODE[7:], "cluster.yaml:4: nodes[1].name: 'a' is also the name of nodes[0]; give each its own"),
        ("nodes:\n- name: no\n  slots: 1\n", 'cluster.yaml:2: nodes[0].name: no is not allowed; it must be a text: write it in quotes, "no"'),
        ("nodes: []\n", "cluster.yaml:1: nodes: the list is empty; it must have at least 1 entry"),
        ("nodes: 4\n", "cluster.yaml:1: nodes: 4 is not allowed; it must be a list of nodes"),
        ("nodes:\n- a\n", 'cluster.yaml:2: nodes[0]: "a" is not allowed; it must be a mapping of fields'),
        ("node:\n- {name: a, slots: 1}\n", "cluster.yaml:1: node: unknown field; did you mean 'nodes'?"),
        ("- a\n", "cluster.yaml:1: [\"a\"] is not allowed; it must be a mapping that begins with 'nodes:'"),
        ("", "cluster.yaml: the file is empty; it must begin with 'nodes:'"),
        ("# nothing\n", "cluster.yaml: the file is empty; it must begin with 'nodes:'"),
        (NODE + "  slots: 5\n", "cluster.yaml:4:3: not valid YAML: 'slots' is repeated here (first in line 3); keep one of them"),
        ("nodes: [\n", "cluster.yaml:2:1: not valid YAML: expected the node content, but found '<stream end>'"),
        ("a: b: c\n", "cluster.yaml:1:5: not valid YAML: mapping values are not allowed here"),
        (NODE + "---\n" + NODE, "cluster.yaml:4:1: not valid YAML: expected a single document in the stream but found another document"),
        ("nodes: !!python/object:os.system {}\n", "cluster.yaml:1:8: not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'"),
        ("nodes: " + "[" * 1000, "cluster.yaml: not valid YAML: nested too deeply"),
        ("x: 2024-99-99\n", "cluster.yaml: not valid YAML: month must be in 1..12"),
        (
            "nodes: &a [*a]\n",
            "cluster.yaml:1: nodes[0]: a value that contains itself is not allowed; "
            "it must be a mapping of fields",
        ),
    ],
)  # fmt: skip
def test_a_wrong_cluster_is_refused_in_one_sentence(
    tmp_path: Path, text: str, complaint: str
) -> None:
    assert cluster_error(tmp_path, text) == complaint


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    complaint = cluster_error(tmp_path, "nodes:\n- name: A-\n  slots: 0\n  cpu: 3\n")
    assert [line.split(":")[2].strip() for line in complaint.splitlines()] == [
        "nodes[0].name",
        "nodes[0].slots",
        "nodes[0].cpu",
    ]


@pytest.mark.parametrize("name", ["a", "node-1", "a" * 63])
def test_names_as_kubernetes_has_them(name: str) -> None:
    assert JobSpec(name=name, script="a.py").name == name


@pytest.mark.parametrize("name", ["", "A", "1a", "-a", "a-", "a_b", "a.b", "ä", "a" * 64, "a\n"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        JobSpec(name=name, script="a.py")


@pytest.mark.parametrize("name", ["a", "ip-10-0-0-1.ec2.internal", "Node_7", "7", "a" * 253])
def test_nodes_are_called_what_hosts_are_called(name: str) -> None:
    assert NodeSpec(name=name, slots=1).name == name


@pytest.mark.parametrize("name", ["", "-a", "a-", ".a", "a b", "ä", "a/b", "a" * 254, "a\n"])
def test_other_names_of_nodes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a node"):
        NodeSpec(name=name, slots=1)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"nodes: \xff")
    for path, complaint in (
        ("none.yaml", f"none.yaml: there is no such file in {tmp_path}; check the path"),
        (tmp_path / "none", f"{tmp_path}/none: there is no such file; check the path"),
        (tmp_path, f"{tmp_path}: cannot be read: Is a directory"),
        (binary, f"{binary}: not a text file: byte 7 is not UTF-8; save it as UTF-8"),
    ):
        with pytest.raises(SpecError) as caught:
            load_cluster(path)
        assert str(caught.value) == complaint


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["num_stage: 2"], "4: jobs[0].num_stage: unknown field; did you mean 'num_stages'?"),
        (["num_stages: 0"], "4: jobs[0].num_stages: 0 is not allowed; it must be a whole number of at least 1"),
        (["min_replicas: 4", "max_replicas: 2"], "4: jobs[0].min_replicas: 4 is more than max_replicas = 2; lower the one or raise the other"),
        (["min_replicas: 65"], "4: jobs[0].min_replicas: 65 is more than max_replicas = 64; lower the one or raise the other"),
        (["args: [--lr, 3]"], '4: jobs[0].args[1]: 3 is not allowed; it must be a text: write it in quotes, "3"'),
        (["args: --lr 3"], '4: jobs[0].args: "--lr 3" is not allowed; it must be a list of texts'),
        (["environment: {KEY: 0123456}"], "4: jobs[0].environment.KEY: a number is not allowed; it must be a text: write it in quotes"),
        (["environment: {KEY: [hunter2]}"], "4: jobs[0].environment.KEY: a list is not allowed; it must be a text"),
        (["environment: {'[key]': 1}"], "4: jobs[0].environment.[key]: a number is not allowed; it must be a text: write it in quotes"),
        (["sweep: {grid: {1a: [1]}}"], "4: jobs[0].sweep.grid.1a: '1a' is not the name of a parameter; use letters, digits and '_', and no digit at the beginning"),
        (["environment: {KEY: yes}"], "4: jobs[0].environment.KEY: true or false is not allowed; it must be a text: write it in quotes"),
        (["environment: {KEY: 2024-01-31}"], "4: jobs[0].environment.KEY: a date is not allowed; it must be a text: write it in quotes"),
        (["environment: {KEY: }"], "4: jobs[0].environment.KEY: an empty value is not allowed; it must be a text: write it in quotes"),
        (["environment: KEY=hunter2"], "4: jobs[0].environment: a text is not allowed; it must be a mapping of texts to texts"),
        (["args: [--mode, 0755]"], '4: jobs[0].args[1]: 0755 is not allowed; it must be a text: write it in quotes, "0755"'),
        (["args: [--time, 1:30]"], '4: jobs[0].args[1]: 1:30 is not allowed; it must be a text: write it in quotes, "1:30"'),
        (["args: [--since, 2024-01-31]"], '4: jobs[0].args[1]: 2024-01-31 is not allowed; it must be a text: write it in quotes, "2024-01-31"'),
        (["args: [--flag, ~]"], '4: jobs[0].args[1]: an empty value is not allowed; it must be a text: write it in quotes, "~"'),
        (['team: "a\\nb"'], r"4: jobs[0].team: 'a\nb' is not a name; a name begins with a lower-case letter, goes on with lower-case letters, digits and '-', and ends with a letter or digit"),
        (["environment: {1a: x}"], "4: jobs[0].environment: '1a' is not a variable's name; use letters, digits and '_', and no digit at the beginning"),
        (["environment: {RANK: '1'}"], "4: jobs[0].environment: 'RANK' is set by the scheduler; remove it here"),
        (["environment: {PIPOLLUX_TOKEN: x}"], "4: jobs[0].environment: 'PIPOLLUX_TOKEN' is set by the scheduler; remove it here"),
        (["resources:", "  cpu: 2"], "5: jobs[0].resources.cpu: unknown field; did you mean 'cpus'?"),
        (["resources: {cpus: -2}"], "4: jobs[0].resources.cpus: -2 is not allowed; it must be a whole number of at least 0"),
        (["preemptible: 'yes'"], '4: jobs[0].preemptible: "yes" is not allowed; it must be true or false'),
        (["hang_timeout: soon"], "4: jobs[0].hang_timeout: 'soon' is not a duration; give seconds, or a text such as 45m or 36h"),
        (
            [f"max_restarts: {10**30}"],
            f"4: jobs[0].max_restarts: {10**30} is not allowed; it must be a whole number from 0 to "
            "1000000000",
        ),
        (["hang_timeout: 0"], "4: jobs[0].hang_timeout: 0 is not above 0; give a duration such as 36h"),
        (["working_dir: ''"], "4: jobs[0].working_dir: is empty; give a path"),
        (["allocation: [n, n]", "max_replicas: 1"], "4: jobs[0].allocation: names 2 replicas, but min_replicas = 1 and max_replicas = 1; list one node name per running replica"),
        (["hints: {initBatchSiz: 3}"], "4: jobs[0].hints: initBatchSiz is not a known key; did you mean initBatchSize?"),
        (["hints: {numStages: 3}"], "4: jobs[0].hints: numStages is 3 but num_stages of the job is 1; make them equal"),
        (["image: 'train: 2'"], "4: jobs[0].image: 'train: 2' is not a reference to an image; give registry/name:tag or registry/name@sha256:DIGEST, of which only the name (lower-case letters, digits and '.', '_', '-', '/' between them, at most 255) must be there"),
        (["image: 3"], '4: jobs[0].image: 3 is not allowed; it must be a text: write it in quotes, "3"'),
        (["image: train", "working_dir: data"], "5: jobs[0].working_dir: 'data' is relative, but a job with an image begins in no folder of this machine; give a path that begins with '/'"),
        (["image: train", "checkpoint_dir: ~/kept"], "5: jobs[0].checkpoint_dir: '~/kept' is relative, but a job with an image begins in no folder of this machine; give a path that begins with '/'"),
        (["hints: {initBatchSize: abc}"], "4: jobs[0].hints: initBatchSize is 'abc'; it must be a whole number"),
        (["hints: {remainingSamples: -4}"], "4: jobs[0].hints: remainingSamples is -4; it must be at least 0"),
        (["exit_codes: {fail: [300]}"], "4: jobs[0].exit_codes.fail[0]: 300 is not allowed; it must be a whole number from 1 to 255"),
        (["exit_codes: {fail: [0]}"], "4: jobs[0].exit_codes.fail[0]: 0 is not allowed; it must be a whole number from 1 to 255"),
        (["requested_replicas: 0"], "4: jobs[0].requested_replicas: 0 is not allowed; it must be a whole number of at least 1"),
        (["after: [3]"], "4: jobs[0].after[0]: 3 is not allowed; it must be a mapping of fields"),
        (["hints: 7"], "4: jobs[0].hints: must be a mapping, as in {initBatchSize: 64}"),
    ],
)  # fmt: skip
def test_a_wrong_job_is_refused_in_one_sentence(
    tmp_path: Path, lines: list[str], complaint: str
) -> None:
    assert jobs_error(tmp_path, *lines) == "jobs.yaml:" + complaint


def models_of(spot: Spot) -> Iterator[type[BaseModel]]:
    """The model of a value, and those of the values in it."""
    model = spot.model
    if model is not None:
        yield model
        for name, field in model.model_fields.items():
            inside = spot.inside(field.alias or name)
            assert inside is not None
            yield from models_of(inside)
    elif (entry := spot.inside(0)) is not None:
        yield from models_of(entry)


@pytest.mark.parametrize("model", [JobBatch, ClusterSpec, TeamsSpec, NewToken])
def test_descriptions_name_the_bounds_of_their_fields(model: type[BaseModel]) -> None:
    """A message about a value out of bounds would say that it is allowed otherwise."""
    for inner in models_of(Spot(model)):
        for name, field in inner.model_fields.items():
            spot = Spot(inner).inside(name)
            if spot is None or not field.description or inner is SchedHints:
                continue
            for one in spot.members:
                for bound, value in one.bounds.items():
                    assert str(value) in field.description, (inner, name, bound)


def test_hints_are_named_with_key_and_value(tmp_path: Path) -> None:
    complaint = jobs_error(tmp_path, "hints:", "  initBatchSize: -3")
    assert re.match(r"jobs.yaml:4: jobs\[0\].hints: initBatchSize is -3; ", complaint)


def test_hints_take_stages_and_micro_batches_from_their_job() -> None:
    job = parse_job(
        {
            "name": "a",
            "script": "a.py",
            "num_stages": 3,
            "num_microbatches": 6,
            "hints": {"initBatchSize": 8},
        }
    )
    assert job.hints is not None
    assert (job.hints.num_stages, job.hints.num_microbatches) == (3, 6)


DIGEST = "@sha256:" + "0a" * 32


@pytest.mark.parametrize(
    "image",
    [
        "train",
        "train:2.1",
        "team/train_it--now.v2/deep:A_b-.9",
        "registry.example/train",
        "localhost:5000/train:2",
        "[::1]:5000/train",
        "Registry.example:443/team/train:2" + DIGEST,
        "train" + DIGEST,
        "train@sha512:" + "f" * 128,
        "a" * 255 + ":" + "t" * 128 + DIGEST,
    ],
)
def test_references_to_images(image: str) -> None:
    assert JobSpec(name="a", image=image).image == image
    assert JobSpec(name="a", image=image, script="in/it.py").script == "in/it.py"


@pytest.mark.parametrize(
    "image",
    [
        *(
            "",
            " train",
            "train ",
            "train\n",
            "tra in",
            "Train",
            "träin",
            "-train",
            "train-",
            "a..b",
        ),
        *("train:", "train:-x", "train:" + "t" * 129, "train@sha256:0a", "train@md5:" + "0" * 32),
        *(
            "train@sha256:" + "0A" * 32,
            "/train",
            "train/",
            "a//b",
            "http://registry/train",
            "$(id)",
        ),
        *("registry.example:port/train", "a" * 256, "a/" * 300 + "a", "a-" * 300 + "!"),
    ],
)
def test_what_is_no_reference_to_an_image(image: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job({"name": "a", "image": image})
    (problem,) = caught.value.problems
    assert re.match(r"job: image: .* is not a reference to an image; give", problem, re.DOTALL)
    assert len(problem) < 350


def test_a_job_has_a_script_or_an_image(tmp_path: Path) -> None:
    says = "script: is missing; give the path of a Python script, or instead a module such as package.train, a command or an image"
    for data in ({"name": "a"}, {"name": "a", "script": None, "image": None}):
        with pytest.raises(SpecError) as caught:
            parse_job(data)
        assert str(caught.value) == f"job: {says}"
    path = tmp_path / "jobs.yaml"
    path.write_text("jobs:\n- image: train\n  name: a\n- args: []\n  name: b\n")
    with pytest.raises(SpecError) as caught:
        load_jobs(path)
    assert str(caught.value) == f"{path}:4: jobs[1].{says}"


def test_the_script_of_an_image_is_not_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    inside = JobSpec(name="a", image="train:2", script="train.py")
    assert with_script_found(inside) == inside
    whole = JobSpec(name="a", image="train:2")
    assert with_script_found(whole) == whole
    with pytest.raises(SpecError, match="job 'a': script: is missing; give the path"):
        resolve_script(whole)
    here = JobSpec(name="a", script="train.py")
    assert with_script_found(here).script == str(tmp_path / "train.py")


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
# No program can be started with a NUL among its arguments or in its environment.
TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)
JOBS = st.fixed_dictionaries(
    {"name": NAMES, "script": st.just("train.py")},
    optional={
        "args": st.lists(TEXT, max_size=3),
        "num_stages": st.integers(1, 8),
        "num_microbatches": st.integers(1, 32),
        "min_replicas": st.integers(1, 4),
        "max_replicas": st.integers(4, 99),
        "preemptible": st.booleans(),
        "resources": st.fixed_dictionaries(
            {}, optional={"cpus": st.integers(0, 9), "memory": st.sampled_from(["8GiB", 5, "1 kB"])}
        ),
        "environment": st.dictionaries(st.sampled_from(["A", "B_1"]), TEXT),
        "working_dir": st.sampled_from([None, "/tmp"]),
        "image": st.sampled_from([None, "train", "registry.example/train:2.1"]),
        "max_restarts": st.integers(0, 9),
        "hints": st.sampled_from([None, {"initBatchSize": 16, "maxProfiledReplicas": 2}]),
    },
)


@examples(50)
@given(JOBS)
def test_a_job_survives_the_way_through_json(data: dict[str, Any]) -> None:
    job = parse_job(data)
    sent = job.model_dump_json()
    assert parse_job(json.loads(sent)) == job
    assert parse_job(job.model_dump(mode="json")) == job
    for name in data.keys() - {"args", "resources", "hints"}:
        assert getattr(job, name) == data[name]


def test_a_job_sent_as_json_is_complained_about_by_field() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job({"name": "a", "scrip": "x"}, "request")
    assert caught.value.problems == ("request: scrip: unknown field; did you mean 'script'?",)
    with pytest.raises(SpecError) as caught:
        parse_job([])
    assert (
        str(caught.value) == "job: [] is not allowed; it must be a mapping that begins with 'name:'"
    )


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        JobSpec(name="a", script="x").name = "b"


def test_a_script_is_found_beside_its_file_or_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    jobs_file = there / "jobs.yaml"
    job = JobSpec(name="a", script="train.py")

    with pytest.raises(SpecError) as caught:
        resolve_script(job, jobs_file, must_exist=True)
    assert str(caught.value) == (
        f"job 'a': script: there is no file {there}/train.py, nor {here}/train.py; check the path"
    )
    assert resolve_script(job, jobs_file).path == here / "train.py"

    (here / "train.py").touch()
    assert resolve_script(job, jobs_file, must_exist=True) == (
        here / "train.py",
        "the current folder",
    )
    (there / "train.py").touch()
    found = resolve_script(job, jobs_file, must_exist=True)
    assert found == (there / "train.py", f"the folder of {jobs_file}")
    absolute = JobSpec(name="a", script=str(here / "train.py"))
    assert resolve_script(absolute, jobs_file).found_in == "an absolute path"


def test_what_teams_refuse_is_named() -> None:
    """A notice may be 0, and a job need not have a user."""
    with pytest.raises(SpecError, match=r"notice: -3 is below 0; give a duration .*, or 0$"):
        parse_teams({"teams": [{"name": "text"}], "notice": -3})
    teams = parse_teams(
        {
            "teams": [{"name": "vision", "users": ["ana"]}],
            "priorities": [{"name": "urgent", "value": 1, "users": ["ana"]}],
            "notice": 0,
        }
    )
    with pytest.raises(SpecError, match="user: a job without a user is not in team 'vision'; its"):
        teams.check(JobSpec(name="toy", script="x.py", team="vision"))
    with pytest.raises(SpecError, match="'urgent' is not for a job without a user; its users"):
        teams.check(JobSpec(name="toy", script="x.py", priority="urgent"))


def test_only_what_is_close_is_suggested() -> None:
    assert closest("num_stage", ["num_stages", "name"]) == "num_stages"
    assert closest("Slots", ["slots"]) == "slots"
    assert closest("colour", ["slots", "name"]) is None
