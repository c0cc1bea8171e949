"""What `pipollux serve` hands on to sbatch reaches a real Slurm, and holds there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipollux_sched.backend.base import BackendError
from pipollux_sched.backend.slurm.output import assignments
from pipollux_sched.backend.slurm.rented_pools import PoolOptions, RentedPools
from tests.hosts.harness.slurm import SlurmCluster
from tests.sched.backend.slurm.conftest import MakeEngine
from tests.waiting import until

pytestmark = pytest.mark.exhaustive

NAME = "pipollux-options"


@pytest.fixture(autouse=True)
def nothing_is_rented_for_ever(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.call("scancel", "--name", NAME)
    cluster.wait_until(lambda: not cluster.call("squeue", "-h", "--name", NAME))


@pytest.fixture
def reservation(cluster: SlurmCluster) -> Iterator[str]:
    """A reservation of n3, by name."""
    when = ("StartTime=now", "Duration=60", "Users=root", "Nodes=n3")
    cluster.call("scontrol", "create", "reservation", "ReservationName=ours", *when)
    yield "ours"
    cluster.call("scancel", "--name", NAME)
    cluster.wait_until(lambda: not cluster.call("squeue", "-h", "--name", NAME))
    cluster.call("scontrol", "delete", "ReservationName=ours")


@pytest.fixture
def feature(cluster: SlurmCluster) -> Iterator[str]:
    """A feature that n2 alone has."""
    update = ("scontrol", "update", "NodeName=n2")
    cluster.call(*update, "AvailableFeatures=big", "ActiveFeatures=big")
    yield "big"
    cluster.call(*update, "AvailableFeatures=", "ActiveFeatures=")


def job_of(cluster: SlurmCluster) -> dict[str, str]:
    """Return what Slurm says of the only allocation."""
    (number,) = cluster.call("squeue", "-h", "--name", NAME, "-o", "%i").split()
    return assignments(cluster.call("scontrol", "show", "job", "-o", number))


def test_account_partition_time_and_further_options(
    cluster: SlurmCluster, make_engine: MakeEngine
) -> None:
    options = PoolOptions(
        name=NAME,
        num_nodes=1,
        partition="main",
        account="ada",
        qos="high",
        time="1:30:00",
        gres="gpu:2",
        more=["--exclude=n1,n3", "--comment=a b"],
    )
    engine = make_engine(RentedPools(options))
    until(lambda: set(engine.nodes()) == {"n2"})
    said = job_of(cluster)
    assert said["Account"] == "ada"
    assert said["Partition"] == "main"
    assert said["TimeLimit"] == "01:30:00"
    assert said["Comment"] == "a b"
    assert engine.nodes()["n2"].slots == 4, "a node comes as a whole"
    # Slurm without a database of accounts keeps no QOS; sbatch itself takes the option.
    assert "--qos=high" in options.arguments()


def test_a_constraint(cluster: SlurmCluster, feature: str, make_engine: MakeEngine) -> None:
    engine = make_engine(RentedPools(PoolOptions(name=NAME, num_nodes=1, constraint=feature)))
    until(lambda: set(engine.nodes()) == {"n2"})
    assert job_of(cluster)["Features"] == "big"


def test_a_reservation(cluster: SlurmCluster, reservation: str, make_engine: MakeEngine) -> None:
    engine = make_engine(RentedPools(PoolOptions(name=NAME, num_nodes=1, reservation=reservation)))
    until(lambda: set(engine.nodes()) == {"n3"})
    assert job_of(cluster)["Reservation"] == "ours"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PoolOptions(name=NAME, num_nodes=1, constraint="none"), "Invalid feature specification"),
        (PoolOptions(name=NAME, num_nodes=1, reservation="nope"), "reservation is invalid"),
        (PoolOptions(name=NAME, num_nodes=1, more=["--foo"]), "unrecognized option '--foo'"),
        (PoolOptions(name=NAME, num_nodes=1, time="soon"), "Invalid --time specification"),
    ],
)
def test_a_wrong_one_is_refused_in_the_words_of_slurm(
    options: PoolOptions, said: str, make_engine: MakeEngine
) -> None:
    with pytest.raises(BackendError, match=said):
        make_engine(RentedPools(options))
