"""From events to receivers: real requests, in a time that is moved by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from email import message_from_string
from typing import Any

import pytest

from pipollux_sched.lifecycle import (
    Allocate,
    Cancel,
    Exited,
    NodeLost,
    Outcome,
    Resume,
    Suspend,
    SweepEnded,
)
from pipollux_sched.notifications import courier
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store, StoredForecast
from pipollux_sched.store import notifications as rows
from pipollux_sched.store.submissions import Submission
from pipollux_sched.store.sweeps import TrialRecord
from tests.sched.store.stores import Clock
from tests.waiting import until

from .conftest import Outbox, hook
from .receivers import SECRET, MailServer, Receiver


def test_a_signed_webhook_for_each_end(outbox: Outbox, receiver: Receiver) -> None:
    outbox.submit("good", hook(receiver), user="ana")
    outbox.submit("bad", hook(receiver))
    outbox.submit("mute")
    for name, outcome in (("good", Outcome.COMPLETE), ("mute", Outcome.COMPLETE)):
        outbox.end(name, outcome)
    outbox.end("bad", Outcome.FAILED, "exit status 3\nTraceback: of the log")
    outbox.deliver()
    outbox.deliver()
    first, second = sorted(receiver.requests, key=lambda one: one.data["data"]["event"])
    assert first.is_signed()
    assert second.is_signed()
    assert not first._replace(body=first.body + b" ").is_signed()
    assert first.data == {
        "type": "job.completed",
        "timestamp": "1970-01-01T00:16:40Z",
        "data": {
            "job": "good",
            "attempt": 1,
            "user": "ana",
            "team": None,
            "event": first.data["data"]["event"],
            "text": "complete at step 9, epochs done: 3",
        },
    }
    assert second.data["type"] == "job.failed"
    text = second.data["data"]["text"]
    assert text == "failed: Failed once, max_restarts is 0: exit status 3"
    assert first.headers["webhook-id"] != second.headers["webhook-id"]
    assert abs(int(first.headers["webhook-timestamp"]) - outbox.clock.now) < 2
    assert outbox.states() == ["delivered", "delivered"]
    assert all(one.target is None for one in outbox.store.notifications.recent(9))


def test_failures_are_retried_with_the_same_id(
    make_outbox: Callable[..., Outbox], receiver: Receiver, clock: Clock
) -> None:
    outbox = make_outbox(retries=(10.0, 100.0))
    receiver.statuses = [500, 503]
    outbox.submit("toy", hook(receiver))
    outbox.end("toy")
    outbox.deliver()
    assert [one.status for one in receiver.requests] == [500]
    clock.now += 8
    outbox.deliver()
    assert len(receiver.requests) == 1  # it is not due yet
    clock.now += 4
    outbox.restart()
    outbox.deliver()
    assert outbox.store.notifications.recent(1)[0].error == "it answers with status 503"
    clock.now += 111
    outbox.deliver()
    clock.now += 1000
    outbox.deliver()
    assert [one.status for one in receiver.requests] == [500, 503, 204]
    assert len({one.headers["webhook-id"] for one in receiver.requests}) == 1
    assert len({one.headers["webhook-timestamp"] for one in receiver.requests}) == 3
    assert all(one.is_signed() for one in receiver.requests)
    (found,) = outbox.store.notifications.recent(9)
    assert (found.state.value, found.attempts, found.error) == ("delivered", 3, None)


def test_given_up_after_a_day_or_when_the_receiver_is_gone(
    outbox: Outbox, receiver: Receiver, clock: Clock
) -> None:
    receiver.statuses = [500] * 100
    outbox.submit("toy", hook(receiver))
    outbox.end("toy")
    for _ in range(60):
        outbox.deliver()
        clock.now += 1800
    (found,) = outbox.store.notifications.recent(9)
    assert (found.state.value, found.error) == ("failed", "it answers with status 500")
    assert 8 < len(receiver.requests) < 20
    receiver.statuses = [410]
    outbox.submit("gone", hook(receiver))
    outbox.end("gone")
    outbox.deliver()
    assert outbox.states() == ["failed", "failed"]


def test_a_receiver_may_ask_to_wait(outbox: Outbox, receiver: Receiver, clock: Clock) -> None:
    receiver.statuses, receiver.headers = [429], {"Retry-After": "900"}
    outbox.submit("toy", hook(receiver))
    outbox.end("toy")
    outbox.deliver()
    clock.now += 800
    outbox.deliver()
    assert len(receiver.requests) == 1
    clock.now += 101
    outbox.deliver()
    assert [one.status for one in receiver.requests] == [429, 204]


def test_a_slow_receiver_holds_up_itself_alone(
    make_outbox: Callable[..., Outbox], receiver: Receiver
) -> None:
    outbox = make_outbox(limit=240.0, most_at_once=2)
    with Receiver() as slow:
        slow.may_answer.clear()
        outbox.submit("slow", hook(slow))
        outbox.submit("toy", hook(receiver))
        outbox.end("slow")
        outbox.end("toy")
        outbox.notifier.collector.collect()
        outbox.notifier.deliver()
        until(lambda: outbox.states()[1] == "delivered", "the other one is delivered")
        until(lambda: slow.requests, "the slow one has its request")
        assert outbox.states() == ["pending", "delivered"]
        outbox.submit("next", hook(receiver))
        outbox.end("next")
        outbox.notifier.collector.collect()

        def delivered() -> bool:
            outbox.notifier.deliver()
            return outbox.states()[2] == "delivered"

        until(delivered, "a later one is delivered")
        slow.may_answer.set()
        until(lambda: outbox.states()[0] == "delivered", "the slow one is delivered")
    assert len(slow.requests) == 1


def test_a_dead_receiver_is_given_a_while(make_outbox: Callable[..., Outbox]) -> None:
    outbox = make_outbox(limit=1.0)
    with Receiver() as dead:
        dead.may_answer.clear()
        outbox.submit("toy", hook(dead))
        outbox.end("toy")
        outbox.deliver()
    (found,) = outbox.store.notifications.recent(9)
    assert (found.state.value, found.error) == ("pending", "no answer in time")
    assert outbox.notifier.couriers.num_processes == 0


def test_events_before_a_channel_are_not_sent(outbox: Outbox, receiver: Receiver) -> None:
    outbox.submit("early", user="ana")
    outbox.end("early")
    outbox.clock.now += 1
    spec = {"webhook": receiver.url, "secret": SECRET, "events": ["completed"]}
    outbox.store.notifications.add_channel("user:ana", "ops", spec)
    outbox.submit("mine", user="ana")
    outbox.submit("hers", user="bo")
    outbox.submit("named", {"channel": "ops", "events": ["failed"]}, user="ana")
    for name in ("mine", "hers"):
        outbox.end(name)
    outbox.end("named", Outcome.FAILED, "no")
    outbox.deliver()
    assert sorted(one.data["data"]["job"] for one in receiver.requests) == ["mine", "named"]
    assert {one.label for one in outbox.store.notifications.recent(9)} == {
        "channel ops (webhook 127.0.0.1)"
    }


def test_an_event_that_is_logged_while_events_are_read_is_sent_once(
    outbox: Outbox, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        outbox.submit(name, hook(receiver))
    outbox.end("first")
    read = outbox.store.events

    def events(*args: Any, **options: Any) -> list[dict[str, Any]]:
        monkeypatch.undo()
        outbox.end("second")
        return read(*args, **options)

    monkeypatch.setattr(outbox.store, "events", events)
    outbox.deliver()
    outbox.deliver()
    assert sorted(one.data["data"]["job"] for one in receiver.requests) == ["first", "second"]


def test_teams(outbox: Outbox, receiver: Receiver) -> None:
    entry = {"webhook": receiver.url, "secret": SECRET, "events": ["completed"]}
    teams = {"teams": [{"name": "vision", "users": ["ana"], "notify": [entry]}, {"name": "text"}]}
    outbox.store.teams.set_spec(teams)
    outbox.submit("seen", user="ana")
    outbox.submit("other", team="text", user="ana")
    outbox.end("seen")
    outbox.end("other")
    outbox.deliver()
    assert [one.data["data"]["job"] for one in receiver.requests] == ["seen"]


def test_preemptions_are_collected(outbox: Outbox, receiver: Receiver, clock: Clock) -> None:
    outbox.submit("toy", hook(receiver, "preempted"), max_restarts=99)
    for _ in range(10):
        outbox.preempt("toy")
        outbox.deliver()
        clock.now += 300
    assert receiver.texts == ["team text takes its slots back"]
    clock.now += 3600
    outbox.deliver()
    _, digest = receiver.requests
    assert digest.data["type"] == "jobs.digest"
    assert digest.data["data"]["count"] == 9
    assert len(digest.data["data"]["events"]) == 9
    outbox.start("toy")
    outbox.store.transition("toy", NodeLost(11, "node-a is dead", "node-a"))
    outbox.deliver()
    assert len(receiver.requests) == 2
    clock.now += 3600
    outbox.deliver()
    assert receiver.requests[-1].data["data"]["text"] == "asked to stop: node-a is dead"


def test_a_user_s_own_suspension_is_no_preemption(outbox: Outbox, receiver: Receiver) -> None:
    outbox.submit("toy", hook(receiver, "preempted"))
    outbox.start("toy")
    outbox.store.transition("toy", Suspend())
    outbox.store.transition("toy", Exited(1, Outcome.STOPPED, step=3))
    outbox.deliver()
    assert receiver.requests == []


def test_a_flood_is_collected(outbox: Outbox, receiver: Receiver, clock: Clock) -> None:
    spec = {"webhook": receiver.url, "secret": SECRET, "events": ["completed"]}
    outbox.store.notifications.add_channel("user:", "ops", spec)
    for number in range(rows.BURST + 5):
        outbox.submit(f"job-{number}")
        outbox.end(f"job-{number}")
    outbox.deliver()
    assert len(receiver.requests) == rows.BURST
    clock.now += rows.BURST_SECONDS
    outbox.deliver()
    digest = receiver.requests[-1].data["data"]
    assert (digest["count"], len(digest["events"])) == (5, 5)


def test_a_sweep_notifies_once(outbox: Outbox, receiver: Receiver) -> None:
    sweep = {"grid": {"lr": [0.1, 0.2]}, "metric": "loss"}
    outbox.submit("rates", hook(receiver), sweep=sweep, args=["{lr}"])
    template = JobSpec.model_validate({"name": "rates-0", "script": "train.py"})
    plain = template.model_dump(mode="json")
    for number in range(2):
        trial = TrialRecord("rates", number, {"lr": 0.1})
        entry = Submission(f"rates-{number}", plain, "token", 0, trial=trial)
        outbox.store.submit_all([entry])
        outbox.end(f"rates-{number}", Outcome.FAILED, "no")
    outbox.deliver()
    assert receiver.requests == []
    outbox.store.transition("rates", SweepEnded(complete=False, message="No trial is complete."))
    outbox.deliver()
    assert receiver.texts == ["failed: No trial is complete."]


def test_a_cancellation_is_sent_when_the_job_has_stopped(
    outbox: Outbox, receiver: Receiver
) -> None:
    for name in ("queued", "runs", "default", "pruned"):
        rule = hook(receiver) if name == "default" else hook(receiver, "cancelled")
        outbox.submit(name, rule)
    outbox.start("runs")
    for name in ("queued", "runs", "default"):
        outbox.store.transition(name, Cancel())
    outbox.store.transition("pruned", Cancel(pruned="others are better"))
    outbox.deliver()
    assert [one.data["data"]["job"] for one in receiver.requests] == ["queued"]
    outbox.store.transition("runs", Exited(1, Outcome.STOPPED, step=3))
    outbox.deliver()
    found = [(one.data["type"], one.data["data"]["job"]) for one in receiver.requests]
    assert found == [("job.cancelled", "queued"), ("job.cancelled", "runs")]
    assert receiver.texts == ["cancelled", "cancelled"]


def test_a_cancelled_sweep_notifies_once(outbox: Outbox, receiver: Receiver) -> None:
    sweep = {"grid": {"lr": [0.1, 0.2]}, "metric": "loss"}
    outbox.submit("rates", hook(receiver, "cancelled"), sweep=sweep, args=["{lr}"])
    template = JobSpec.model_validate({"name": "rates-0", "script": "train.py"})
    trial = TrialRecord("rates", 0, {"lr": 0.1})
    entry = Submission("rates-0", template.model_dump(mode="json"), "token", 0, trial=trial)
    outbox.store.submit_all([entry])
    outbox.store.transition("rates", Cancel())
    outbox.store.transition("rates-0", Cancel())
    outbox.deliver()
    assert [one.data["data"]["job"] for one in receiver.requests] == ["rates"]


def test_waiting_too_long_by_each_rule(outbox: Outbox, receiver: Receiver, clock: Clock) -> None:
    rules = [hook(receiver, "waiting", waiting_after=limit) for limit in ("10m", "2h")]
    outbox.submit("toy", *rules)
    outbox.submit("after", *rules, after=["toy"])
    outbox.submit("held", *rules)
    outbox.store.transition("held", Suspend())
    for _ in range(20):
        outbox.deliver()
        clock.now += 500
    told = ["has waited 10 min for slots: 2 slots", "has waited 2 h for slots: 2 slots"]
    assert receiver.texts == told
    outbox.restart()
    outbox.deliver()
    assert receiver.texts == told  # another scheduler does not begin anew
    outbox.preempt("toy")
    clock.now += 601
    outbox.deliver()
    assert receiver.texts == [*told, told[0]]  # another wait


def test_forecasts_that_are_missed(outbox: Outbox, receiver: Receiver, clock: Clock) -> None:
    now = clock.now

    def forecast(name: str, start: float | None, low: float, high: float | None) -> None:
        begins = None if start is None else dict.fromkeys(("low", "median", "high"), now + start)
        end = {"low": now + low, "median": now + low, "high": None if high is None else now + high}
        found = StoredForecast(clock.now, begins, end, end)
        outbox.store.forecasts.keep({name: found}, [name])

    for name in ("late", "early", "fine", "held"):
        outbox.submit(name, hook(receiver, "forecast_missed"))
        forecast(name, None, 10.0, None)  # not bounded: not yet a promise
    forecast("late", 50.0, 100.0, 200.0)
    forecast("late", 500.0, 1000.0, 2000.0)  # a later one does not move it
    for name in ("early", "fine", "held"):
        forecast(name, None, 100.0, 200.0)
    outbox.start("early")
    outbox.start("fine")
    outbox.store.transition("held", Suspend())
    outbox.store.transition("held", Resume())
    clock.now += 20
    outbox.store.transition("early", Exited(1, Outcome.COMPLETE, 9, 3))
    outbox.deliver()
    (early,) = receiver.texts
    # In seconds, as some intervals are that short.
    moments = [datetime.fromtimestamp(now + after) for after in (100, 200, 20)]
    low, high, ended = (moment.strftime("%Y-%m-%d %H:%M:%S") for moment in moments)
    interval = f"was forecast between {low} and {high}, and it ended at {ended}"
    assert early == f"forecast missed: its end {interval}"
    clock.now += 100
    outbox.store.transition("fine", Exited(1, Outcome.COMPLETE, 9, 3))
    for _ in range(3):
        outbox.deliver()
    clock.now += 100
    for _ in range(3):
        outbox.deliver()
    found = [(one.data["data"]["job"], one.data["data"]["text"]) for one in receiver.requests]
    assert [name for name, _ in found] == ["early", "late", "late"]
    assert found[1][1].endswith("and it has not started")
    assert found[2][1].endswith("and it has not ended")


def test_a_sweep_starts_with_its_first_trial(
    outbox: Outbox, receiver: Receiver, clock: Clock
) -> None:
    sweep = {"grid": {"lr": [0.1, 0.2]}, "metric": "loss"}
    outbox.submit("rates", hook(receiver, "forecast_missed"), sweep=sweep, args=["{lr}"])
    now = clock.now
    start = {"low": now, "median": now + 10, "high": now + 50}
    end = {"low": now + 100, "median": now + 100, "high": now + 200}
    outbox.store.forecasts.keep({"rates": StoredForecast(now, start, end, end)}, ["rates"])
    clock.now += 20
    template = JobSpec.model_validate({"name": "rates-0", "script": "train.py"})
    trial = TrialRecord("rates", 0, {"lr": 0.1})
    entry = Submission("rates-0", template.model_dump(mode="json"), "token", 0, trial=trial)
    outbox.store.submit_all([entry])
    outbox.start("rates-0")
    clock.now += 100
    outbox.deliver()
    assert receiver.texts == []
    clock.now += 100
    outbox.deliver()
    assert [text.rpartition(", and ")[2] for text in receiver.texts] == ["it has not ended"]


def test_deletion_waits_for_nothing_and_loses_nothing(outbox: Outbox, receiver: Receiver) -> None:
    outbox.submit("toy", hook(receiver))
    outbox.end("toy")
    outbox.notifier.collector.collect()  # as `JobDeletion` does
    outbox.store.deletions.begin("toy")
    for pending in outbox.store.deletions.pending():
        outbox.store.deletions.finish(pending)
    outbox.deliver()
    assert receiver.texts == ["complete at step 9, epochs done: 3"]
    assert outbox.store.notifications.rules() == []


def test_only_allowed_hosts_are_connected_to(
    make_outbox: Callable[..., Outbox], receiver: Receiver
) -> None:
    outbox = make_outbox(hosts=("public", "localhost"))
    by_name = {**hook(receiver), "webhook": f"http://localhost:{receiver.port}/"}
    loopback = f"127.0.0.1:{receiver.port}"
    outbox.submit("named", by_name)
    outbox.submit("numbered", hook(receiver))
    outbox.submit("apprised", {"apprise": f"json://{loopback}/"})
    for name in ("named", "numbered", "apprised"):
        outbox.end(name)
    outbox.deliver()
    assert [one.data["data"]["job"] for one in receiver.requests] == ["named"]
    errors = {one.job: one.error for one in outbox.store.notifications.recent(9)}
    why = "127.0.0.1 is not an address that an admin allows with serve --notify-host"
    assert errors == {"named": None, "numbered": why, "apprised": why}
    assert sorted(outbox.states()) == ["delivered", "failed", "failed"]


def test_redirects_are_not_followed(outbox: Outbox, receiver: Receiver) -> None:
    with Receiver(302) as first:
        first.headers = {"Location": receiver.url}
        outbox.submit("toy", hook(first))
        outbox.end("toy")
        outbox.deliver()
    assert receiver.requests == []
    assert outbox.store.notifications.recent(1)[0].error == "it answers with status 302"


def test_apprise(outbox: Outbox, receiver: Receiver) -> None:
    for scheme in ("json", "form"):
        where = f"{scheme}://127.0.0.1:{receiver.port}/"
        outbox.submit(f"by-{scheme}", {"apprise": where})
        outbox.end(f"by-{scheme}")
    receiver.statuses = [500]
    outbox.deliver()
    outbox.clock.now += 6
    outbox.deliver()
    assert sorted(one.status for one in receiver.requests) == [204, 204, 500]
    sent = [one for one in receiver.requests if b"by-json" in one.body]
    found = json.loads(sent[-1].body)
    assert found["title"] == "Pipollux: by-json completed"
    assert found["message"].endswith("by-json: complete at step 9, epochs done: 3")
    assert outbox.states() == ["delivered", "delivered"]


def test_mail(outbox: Outbox) -> None:
    with MailServer() as mail:
        url = f"mailto://bot:pass%20word@127.0.0.1:{mail.port}?from=bot@a.test&to=ana@a.test"
        outbox.submit("toy", {"apprise": url, "events": ["failed"]})
        outbox.end("toy", Outcome.FAILED, "exit status 3")
        outbox.deliver()
        (found,) = mail.mails
    assert "Subject: Pipollux: toy failed" in found
    text = message_from_string(found).get_payload()[-1].get_payload(decode=True).decode()
    assert "toy: failed: Failed once, max_restarts is 0: exit status 3" in text
    assert outbox.states() == ["delivered"]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("nothing://here", "Apprise does not understand the URL"),
        ("json://localhost", None),
    ],
)
def test_urls_of_apprise_are_checked(outbox: Outbox, url: str, error: str | None) -> None:
    assert outbox.notifier.why_not(url) == error


def test_files_of_the_scheduler_are_not_read(
    outbox: Outbox, receiver: Receiver, tmp_path: object
) -> None:
    """A template of Microsoft Teams is a file of the host that sends."""
    secret = f"{tmp_path}/secret.json"
    with open(secret, "w") as file:
        file.write('{"text": "{{ app_body }}", "summary": "TOP"}')
    answer = outbox.notifier.send(
        {
            "apprise": f"workflow://127.0.0.1:{receiver.port}/WORKFLOW/SIGNATURE?template={secret}",
            "title": "t",
            "text": "x",
        }
    )
    assert answer.error is not None
    assert "files and programs of the scheduler's host are not used" in answer.error
    assert receiver.requests == []


def test_idle_processes_end(make_outbox: Callable[..., Outbox], receiver: Receiver) -> None:
    outbox = make_outbox(limit=20.0)
    outbox.submit("toy", hook(receiver))
    outbox.end("toy")
    outbox.deliver()
    couriers = outbox.notifier.couriers
    assert couriers.num_processes == 1
    couriers.tidy(courier.IDLE)
    assert couriers.num_processes == 1
    couriers.tidy(0.0)
    assert couriers.num_processes == 0


def test_the_outbox_stays_bounded(store: Store) -> None:
    target = {"webhook": "http://127.0.0.1:1/", "secret": SECRET}
    for number in range(rows.BURST + rows.MOST_ITEMS + 5):
        item = {"kind": "completed", "job": f"job-{number}", "time": 0.0, "text": "complete"}
        new = rows.NewNotification("user:/ops", "webhook", target, "completed", item["job"], item)
        store.notifications.put(new)
    pending = store.notifications.recent(1000)
    assert len(pending) == rows.BURST + 1
    assert sum(one.count for one in pending) == rows.BURST + rows.MOST_ITEMS + 5
    assert [len(one.items) for one in pending] == [1] * rows.BURST + [rows.MOST_ITEMS]


def test_allocated_but_not_started_is_no_preemption(outbox: Outbox, receiver: Receiver) -> None:
    outbox.submit("toy", hook(receiver, "preempted"))
    outbox.store.transition("toy", Allocate([], "no room"))
    outbox.deliver()
    assert receiver.requests == []
