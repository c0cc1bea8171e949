"""How much the supervisor answers: rates by token, wrong tokens by address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipollux_sched.server import Limits
from pipollux_sched.server.limits import (
    MOST_SENDERS,
    BusyError,
    ConcurrencyLimit,
    RateLimit,
    TooManyRequestsError,
)
from tests.sched.supervised import Service, detail, report


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_is_emptied_and_fills_again() -> None:
    clock = Clock()
    limit = RateLimit(2.0, 3, clock)
    assert [limit.take("a") for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert limit.take("b") == 0.0, "everybody has a bucket of their own"
    clock.now += 0.5
    assert [limit.take("a") for _ in range(2)] == [0.0, 0.5]
    clock.now += 1000.0
    assert [limit.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5], "it holds no more than that"
    with pytest.raises(
        TooManyRequestsError, match=r"job 'a': more than 2 requests per second"
    ) as e:
        limit.check("a", "job 'a'")
    assert e.value.retry_after == 1


def test_at_a_steady_rate_nobody_is_refused() -> None:
    clock = Clock()
    limit = RateLimit(50.0, 1, clock)
    for _ in range(1000):
        assert limit.take("a") == 0.0
        clock.now += 0.0201
    taken = 0
    for _ in range(1000):
        taken += limit.take("a") == 0.0
        clock.now += 0.01
    assert 495 <= taken <= 505, "twice as fast, half are"


def test_a_sender_may_be_allowed_a_multiple() -> None:
    clock = Clock()
    limit = RateLimit(2.0, 3, clock)
    assert [limit.take("a", cost=0.25) for _ in range(13)] == [0.0] * 12 + [0.125]
    clock.now += 0.5
    assert [limit.take("a", cost=0.25) for _ in range(5)] == [0.0] * 4 + [0.125]
    with pytest.raises(TooManyRequestsError, match=r"job 'a': more than 8 requests per second"):
        limit.check("a", "job 'a'", 4.0)


def test_the_buckets_of_strangers_do_not_pile_up() -> None:
    limit = RateLimit(1.0, 1, Clock())
    for number in range(3 * MOST_SENDERS):
        limit.take(f"10.0.{number}")
    assert len(limit._buckets) == MOST_SENDERS


def test_places() -> None:
    places = ConcurrencyLimit(3, 2, "wait")
    with places.take("a"), places.take("a"):
        with pytest.raises(BusyError, match="2 requests of a already wait"), places.take("a"):
            pass
        with places.take("b"):
            with pytest.raises(BusyError, match="3 requests already wait"), places.take("c"):
                pass
            assert places.taken == 3
    assert places.taken == 0
    with pytest.raises(ValueError, match="oops"), places.take("a"):
        raise ValueError("oops")
    assert places.taken == 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Tokens come back so slowly that no test sees one come."""
    slow = Limits(
        job_rate=0.001,
        job_burst=5,
        admin_rate=0.001,
        admin_burst=40,
        wrong_rate=0.001,
        wrong_burst=8,
    )
    with Service(tmp_path_factory.mktemp("state"), slow) as service:
        yield service


def test_one_wild_job_holds_up_nobody_else(service: Service) -> None:
    wild = service.submit("wild", ["node-a"])
    calm = service.submit("calm", ["node-a"])
    answers = [wild.post("/jobs/wild/reports", json=report()).status_code for _ in range(7)]
    assert answers == [200] * 5 + [429] * 2
    refused = wild.put("/jobs/wild/hints?attempt=1", json={})
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) > 900
    assert detail(refused).startswith(
        "job 'wild': more than 0.001 requests per second are too many"
    )
    assert calm.post("/jobs/calm/reports", json=report()).status_code == 200
    assert service.admin.post("/jobs/wild/reports", json=report()).status_code == 200
    assert len([e for e in service.store.events(job="wild") if e["type"] == "progress"]) == 6


def test_a_job_may_send_more_the_more_replicas_it_has(service: Service) -> None:
    wide = service.submit("wide", ["node-a"] * 96, min_replicas=1)
    answers = [
        wide.post("/jobs/wide/heartbeats", json={"attempt": 1, "replica": n}).status_code
        for n in range(17)
    ]
    assert answers == [200] * 15 + [429] * 2, "three times five at once"


def test_who_guesses_is_refused_and_locks_nobody_out(service: Service) -> None:
    stranger = service.client("a guess")
    answers = [stranger.get(f"/jobs/wild?try={n}").status_code for n in range(10)]
    assert answers == [401] * 8 + [429] * 2
    refused = service.client(None).put("/jobs/wild/hints?attempt=1", json={})
    assert refused.status_code == 429
    assert "requests with a wrong token from 127.0.0.1" in detail(refused)
    assert service.admin.get("/jobs/calm").status_code == 200
    own = service.client(service.store.job("calm").token)
    assert own.post("/jobs/calm/reports", json=report()).status_code == 200


def test_the_admin_has_a_limit_too(service: Service) -> None:
    answers = {service.admin.get("/nodes").status_code for _ in range(45)}
    assert answers == {200, 429}
    assert service.admin.post("/jobs/calm/reports", json=report()).status_code == 429
    own = service.client(service.store.job("calm").token)
    assert own.post("/jobs/calm/reports", json=report()).status_code == 200
    assert own.get("/healthz").status_code == 200
