"""What may be written as a destination, where it may lead, and that it stays secret."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pipollux_sched.notifications.hosts import HostRules
from pipollux_sched.notifications.service import NotificationService
from pipollux_sched.notifications.signature import signed_headers
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.notify import NewChannel, NotifySpec, make_secret, secret_bytes
from pipollux_sched.spec.teams import parse_teams
from pipollux_sched.store import ChannelExistsError, Store, UnknownChannelError

SECRET = make_secret()
URL = "https://hooks.example.org/services/T000/B000/XXXX"


def test_the_vector_of_standard_webhooks() -> None:
    found = signed_headers(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),  # noqa: S104  # nothing binds to it
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("2606:4700::1111", True),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert HostRules.parse(["public"]).allows_address(address) is public
    assert not HostRules.parse(["hooks.example.org"]).allows_address(address)


def test_hosts() -> None:
    rules = HostRules.parse(["*.Example.org", "10.1.0.0/16", "fd00::/8"])
    assert rules.why_not("hooks.example.org") is None
    assert rules.names("hooks.example.org.")
    assert not rules.names("example.org.evil.test")
    assert not rules.names("evilexample.org")
    assert rules.why_not("10.1.2.3") is None
    assert rules.allows_address("fd00::7")
    assert rules.why_not("10.2.0.1") is not None
    assert HostRules.parse(["public"]).why_not("localhost") is not None
    assert HostRules.parse(["none"]).why_not("hooks.example.org") is not None
    for wrong in ("http://x", "a/b", "10.0.0.0/99", "", "*"):
        with pytest.raises(ValueError, match="is no host"):
            HostRules.parse([wrong])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, "notify[0]: has no destination; give one of channel, webhook and apprise"),
        ({"webhook": URL, "secret": SECRET, "apprise": "json://x"}, "webhook and apprise"),
        ({"webhook": URL}, "notify[0].secret: is missing"),
        ({"webhook": "ftp://x/T0KEN", "secret": SECRET}, "notify[0].webhook: is not a URL"),
        ({"webhook": "ftp://x/T0KEN", "secret": SECRET}, "its scheme is ftp, not https or http"),
        ({"webhook": "https://x:99999/T0KEN", "secret": SECRET}, "its port is 99999, not a number"),
        ({"webhook": "https://x:T0KEN/", "secret": SECRET}, "its port is not a number from 1 to"),
        ({"webhook": "https:///T0KEN", "secret": SECRET}, "it has no host"),
        ({"webhook": "T0KEN", "secret": SECRET}, "it does not begin with https:// or http://"),
        ({"webhook": "https://a:T0KEN@x/", "secret": SECRET}, "has a user or a fragment"),
        ({"webhook": URL, "secret": "T0KEN"}, "notify[0].secret: is not a webhook's secret"),
        ({"webhook": 7, "secret": SECRET}, "notify[0].webhook: a number is not allowed"),
        ({"apprise": "T0KEN"}, "notify[0].apprise: is not a URL of Apprise"),
        ({"apprise": "json://x", "secret": SECRET}, "notify[0].secret: is for a webhook"),
        ({"channel": "ops", "events": ["done"]}, "notify[0].events"),
        ({"channel": "ops", "events": ["failed", "failed"]}, "names an event twice"),
        ({"channel": "ops", "waiting_after": "soon"}, "is not a duration"),
    ],
)
def test_refused_entries(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job({"name": "toy", "script": "train.py", "notify": [entry]})
    assert words in str(refused.value)
    for secret in ("T0KEN", "XXXX", SECRET):
        assert secret not in str(refused.value)


def test_secrets_are_shown_nowhere() -> None:
    entry = {"webhook": URL, "secret": SECRET}
    apprise = {"apprise": "mailto://bot:hunter2@example.org"}
    job = parse_job({"name": "toy", "script": "train.py", "notify": [entry, apprise]})
    teams = parse_teams({"teams": [{"name": "vision", "notify": [entry, apprise]}]})
    for shown in (
        repr(job),
        json.dumps(job.model_dump(mode="json")),
        repr(teams),
        json.dumps(teams.model_dump(mode="json")),
        repr(job.notify[0]),
        str(job.notify[1].model_dump()),
        job.notify[0].label + job.notify[1].label,
    ):
        for secret in ("XXXX", SECRET, "hunter2"):
            assert secret not in shown
    assert parse_job(job.revealed()) == job
    assert parse_job(job.model_dump(mode="json")).notify == ()
    assert parse_teams(teams.revealed()) == teams
    assert JobSpec.model_validate(job.revealed(exclude_defaults=True)) == job


def test_a_team_has_no_channels() -> None:
    with pytest.raises(SpecError, match="is for job files"):
        parse_teams({"teams": [{"name": "vision", "notify": [{"channel": "ops"}]}]})


def test_channels(store: Store) -> None:
    service = NotificationService(store)
    new = NewChannel.model_validate({"name": "ops", "webhook": URL, "user": "ana"})
    rule, secret = service.add(new)
    assert secret is not None
    assert secret_bytes(secret)
    assert rule.spec["secret"] == secret
    with pytest.raises(ChannelExistsError):
        service.add(new)
    service.check_job("toy", [NotifySpec(channel="ops")], "ana")
    with pytest.raises(UnknownChannelError, match="but one of ana is; add --user ana"):
        service.test(None, "ops")
    with pytest.raises(UnknownChannelError, match="no channel is named 'ops'; see: "):
        service.remove("bob", "ops")
    with pytest.raises(SpecError, match="no channel 'ops' for jobs of no user"):
        service.check_job("toy", [NotifySpec(channel="ops")], None)
    with pytest.raises(ValidationError, match="is for job files"):
        NewChannel.model_validate({"name": "ops", "channel": "other"})


@pytest.mark.parametrize(
    ("hosts", "url", "words"),
    [
        (["public"], "https://127.0.0.1/", "not a host that an admin allows"),
        (["public"], "https://[::1]/", "not a host that an admin allows"),
        (["public"], "http://hooks.example.org/", "give an https URL"),
        (["hooks.example.org"], "https://other.example.org/", "not a host that an admin allows"),
        (["hooks.example.org"], "http://hooks.example.org/", None),
        (["10.0.0.0/8"], "http://10.1.1.1/", None),
        (["none"], "https://hooks.example.org/", "sends no notifications"),
    ],
)
def test_hosts_are_checked_at_submission(
    store: Store, hosts: list[str], url: str, words: str | None
) -> None:
    service = NotificationService(store, hosts)
    entry = NotifySpec.model_validate({"webhook": url, "secret": SECRET})
    if words is None:
        service.check_job("toy", [entry], None)
    else:
        with pytest.raises(SpecError, match=words):
            service.check_job("toy", [entry], None)
