"""The page about notifications: its commands, its job file and its receiver, with a scheduler that
is killed while a notification is on its way.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sched.notifications.receivers import Receiver

from .runner import LIGHT, Cli, one_sentence, wait_until
from .test_cli_jobs_page import block_of, commands_of

TRAIN = "print('trained')\n"
MAIL = "mailto://bot:hunter2@127.0.0.1?from=bot@a.test&to=ana@a.test\n"


def test_the_page_about_notifications(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    verify: dict[str, Any] = {}
    exec(block_of(repository, "notifications.md", "verify"), verify)  # noqa: S102  # the page's
    with Receiver(204, 500) as receiver:
        receiver.at_once = 2  # the third attempt may begin before this test has looked
        receiver.may_answer.clear()
        server = cli.serve("--notify-host", "127.0.0.1")
        here = receiver.url
        add, mail, test, look, remove = commands_of(
            block_of(repository, "notifications.md", "commands")
        )
        refused = one_sentence(cli(*add), 1)
        assert "hooks.example.org is not a host that an admin allows" in refused
        add[add.index("--webhook") + 1] = here
        made = cli(*add)
        assert made.returncode == 0, made.stderr
        secret = made.stdout.strip()
        assert cli(*mail[: mail.index("<")], stdin=MAIL).returncode == 0
        assert cli(*test).returncode == 0
        wait_until(lambda: len(receiver.requests) == 1)
        assert verify["is_genuine"](receiver.requests[0].headers, receiver.requests[0].body, secret)
        assert not verify["is_genuine"](receiver.requests[0].headers, b"other", secret)
        wait_until(lambda: "delivered" in cli(*look).stdout)
        shown = [cli("notify", "-o", "json").stdout, cli("notify").stdout, cli("events").stdout]
        assert cli(*remove).returncode == 0
        shown += [server.output, server.errors]
        for text in shown:
            for word in ("T0KEN", "hunter2", secret):
                assert word not in text


@pytest.mark.exhaustive
def test_a_notification_outlives_the_scheduler(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    with Receiver(500) as receiver:
        receiver.at_once = 1  # the second attempt may begin before this test has looked
        receiver.may_answer.clear()
        server = cli.serve("--notify-host", "127.0.0.1")
        add, mail, *_ = commands_of(block_of(repository, "notifications.md", "commands"))
        add[add.index("--webhook") + 1] = receiver.url
        secret = cli(*add).stdout.strip()
        assert cli(*mail[: mail.index("<")], stdin=MAIL).returncode == 0
        (cli.folder / "train.py").write_text(TRAIN)
        job = block_of(repository, "notifications.md", "job")
        job = job.replace("https://hooks.example.org/lab", receiver.url)
        done = cli("submit", "-", "--wait", stdin=job)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: len(receiver.requests) == 1)  # answered with 500
        described = cli("describe", "char-lm").stdout
        assert "it answers with status 500" in described
        key = yaml.safe_load(job)["jobs"][0]["notify"][1]["secret"]
        shown = [described, cli("notify", "-o", "json").stdout, cli("notify").stdout]
        shown += [cli("describe", "char-lm", "-o", "json").stdout, cli("events").stdout]

        # The next attempt is on its way, and the scheduler is killed before the answer.
        wait_until(lambda: len(receiver.requests) == 2)
        server.send_signal(signal.SIGKILL)
        server.wait()
        receiver.may_answer.set()
        again = cli.serve("--notify-host", "127.0.0.1")
        wait_until(lambda: "delivered after" in cli("notify").stdout)
        ids = [one.headers["webhook-id"] for one in receiver.requests]
        assert len(ids) == 3
        assert len(set(ids)) == 1
        assert [one.data["type"] for one in receiver.requests] == ["job.completed"] * 3
        states = json.loads(cli("notify", "-o", "json").stdout)["notifications"]
        assert [one["state"] for one in states] == ["delivered"]
        shown += [server.output, server.errors, again.output, again.errors]
        for text in shown:
            for word in ("T0KEN", "hunter2", secret, key):
                assert word not in text
