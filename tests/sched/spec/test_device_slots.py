"""CPU slots beside GPU slots, and jobs that ask for one kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_policies import make_policy
from pipollux_policies.registry import POLICIES
from pipollux_sched.allocator.job_infos import job_info, node_info, node_template
from pipollux_sched.allocator.reasons import misfit
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec, load_cluster
from pipollux_sched.spec.job import JobSpec, SpecError

GIB = 2**30


def cluster(text: str, folder: Path) -> ClusterSpec:
    path = folder / "cluster.yaml"
    path.write_text(f"nodes:\n{text}")
    return load_cluster(path)


def test_a_node_with_cpu_slots_is_two_nodes(tmp_path: Path) -> None:
    text = "  - {name: a, slots: 8, cpus: 64, memory: 512GiB, cpu_slots: 16, gpu_type: h200}\n"
    gpus, cpus, other = cluster(text + "  - {name: b, slots: 1}\n", tmp_path).nodes
    assert gpus == NodeSpec(name="a", slots=8, cpus=48, memory=384 * GIB, gpu_type="h200")
    assert cpus == NodeSpec(
        name="a-cpu", slots=16, kind="cpu", beside="a", cpus=16, memory=128 * GIB
    )
    assert other == NodeSpec(name="b", slots=1)
    again = ClusterSpec.model_validate({"nodes": [gpus, cpus, other]})
    assert again.nodes == (gpus, cpus, other)


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ("  - {name: a, slots: 2, kind: cpu, cpu_slots: 1}\n", "cpu_slots: 1 are for a node with"),
        ("  - {name: a, slots: 2, cpus: 4, cpu_slots: 4}\n", "leave none of cpus = 4 to jobs on"),
        ("  - {name: a, slots: 2, memory: 4GiB, cpu_slots: 4}\n", "cpus: is missing; it says"),
        ("  - {name: a, slots: 2, beside: b}\n", "'b' is for a node with kind: cpu"),
        (
            "  - {name: a, slots: 2, cpu_slots: 1}\n  - {name: a-cpu, slots: 1, kind: cpu}\n",
            "cpu_slots: they form a node 'a-cpu', which there is",
        ),
    ],
)
def test_impossible_cpu_slots_are_refused(nodes: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=problem):
        cluster(nodes, tmp_path)


NODES = {
    node.name: node_info(node)
    for node in ClusterSpec(nodes=(NodeSpec(name="a", slots=4, cpus=16, cpu_slots=8),)).nodes
}


def job(name: str, **more: object) -> JobSpec:
    given = {"name": name, "script": "x", "max_replicas": 64, "requested_replicas": 16, **more}
    return JobSpec.model_validate(given)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name == "pollux" else name
        for name in sorted(POLICIES)
    ],
)
def test_every_policy_keeps_jobs_on_their_device(policy: str) -> None:
    """Also those that name none stay off the CPU slots; nobody asks for more than there is."""
    specs = [job("cpu", device="cpu", requested_replicas=8), job("gpu", device="gpu"), job("any")]
    specs = [spec.model_copy(update={"requested_replicas": 2}) for spec in specs]
    jobs = {
        spec.name: job_info(spec, None, age=100.0, created=float(number), nodes=NODES)
        for number, spec in enumerate(specs)
    }
    chosen = make_policy(policy)
    found, _ = chosen.optimize(jobs, NODES, {}, node_template(NODES))
    assert set(found["cpu"]) == {"a-cpu"}
    assert set(found["gpu"]) == set(found["any"]) == {"a"}
    assert list(chosen.allocate_job(jobs["cpu"], NODES)) == ["a-cpu"] * len(
        chosen.allocate_job(jobs["cpu"], NODES)
    )


def test_jobs_that_name_no_device_run_anywhere_without_cpu_slots() -> None:
    nodes = {
        "g": node_info(NodeSpec(name="g", slots=1)),
        "c": node_info(NodeSpec(name="c", slots=1, kind="cpu")),
    }
    info = job_info(job("any"), None, age=0.0, nodes=nodes)
    assert info.resources == {"slots": 1}
    assert [nodes[name].num_fitting(info.all_shapes[0]) for name in "gc"] == [1, 1]


def test_a_job_for_a_device_that_there_is_not_is_refused() -> None:
    nodes = {"g": node_info(NodeSpec(name="g", slots=2))}
    reason = misfit("x", job_info(job("x", device="cpu"), None, age=0.0, nodes=nodes), nodes)
    assert reason is not None
    assert "one replica needs 1 slot and 1 CPU slot on one node" in reason
    assert "g, has 2 slots and 0 CPU slots; set device: gpu in the job, or add a node" in reason
    cpus = {"c": node_info(NodeSpec(name="c", slots=2, kind="cpu"))}
    reason = misfit("x", job_info(job("x", device="gpu"), None, age=0.0, nodes=cpus), cpus)
    assert "0 GPU slots; set device: cpu in the job, or add a node with GPU slots" in str(reason)


def test_replicas_with_several_stages_stay_off_mig_slices() -> None:
    nodes = {
        "whole": node_info(NodeSpec(name="whole", slots=2)),
        "mig": node_info(NodeSpec(name="mig", slots=7, single_stage=True)),
    }
    wide, narrow = job("w", num_stages=2), job("n", num_stages=1)
    infos = [job_info(spec, None, age=0.0, nodes=nodes) for spec in (wide, narrow)]
    fits = [[nodes[n].num_fitting(info.all_shapes[0]) for n in nodes] for info in infos]
    assert fits == [[1, 0], [2, 7]]
    only = {"mig": nodes["mig"]}
    reason = misfit("w", job_info(wide, None, age=0.0, nodes=only), only)
    assert "needs 2 slots and 2 multi-stage slots on one node" in str(reason)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_node_may_have_no_usable_slot(policy: str) -> None:
    """All its GPUs are left out."""
    none = {"a": node_info(NodeSpec(name="a", slots=8), 0)}
    assert none["a"].resources["slots"] == 0
    for nodes in (none, {**none, "b": node_info(NodeSpec(name="b", slots=2))}):
        jobs = {"x": job_info(job("x", requested_replicas=2), None, age=100.0, nodes=nodes)}
        found, _ = make_policy(policy).optimize(jobs, nodes, {}, node_template(nodes))
        assert "a" not in found.get("x", ())
        assert bool(found.get("x")) is (len(nodes) == 2)
