"""Teams of a real scheduler: loans, notices, limits, and what users are told of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .runner import LIGHT, TOY, Cli, one_sentence, wait_until

TEAMS = """
notice: {notice}
teams:
  - {{name: text, quota: 2{more}}}
  - {{name: vision, quota: 2, max_slots_per_job: 2}}
  - {{name: web, max_jobs: 0}}
priorities:
  - {{name: urgent, value: 10}}
"""


def jobs_file(cli: Cli, name: str, *jobs: str) -> str:
    entries = "".join(f"  - {{script: {TOY}, {job}}}\n" for job in jobs)
    (cli.folder / name).write_text(f"jobs:\n{entries}")
    return name


def held(cli: Cli) -> dict[str, int]:
    teams = json.loads(cli("teams", "--output", "json").stdout)["teams"]
    return {team["name"]: team["used"] for team in teams}


def explained(cli: Cli, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("explain", job, "--output", "json").stdout)
    return found


@pytest.mark.exhaustive
def test_a_quota_that_is_lent_comes_back(cli: Cli) -> None:
    cli.program = LIGHT
    (cli.folder / "teams.yaml").write_text(TEAMS.format(notice="1h", more=""))
    cli.serve("--teams", "teams.yaml", "--interval", "0.5", "--grace", "2")
    lent = jobs_file(cli, "lent.yaml", *(f"name: t{n}, team: text" for n in range(4)))
    cli("submit", lent)
    wait_until(lambda: all(job["training"] for job in cli.jobs().values()))
    back = jobs_file(cli, "back.yaml", "name: v0", "name: v1", "name: v2")
    cli("submit", back, "--team", "vision")

    says = "team vision holds 0 of its quota of 2 slots; 2 more are borrowed by team text until "
    wait_until(lambda: says in cli.jobs()["v0"]["message"])
    assert cli.jobs()["v0"]["message"].startswith("waits: ")
    assert explained(cli, "v0")["waits_for"].startswith(says)
    kinds = [[one["kind"] for one in explained(cli, f"t{n}")["limits"]] for n in range(4)]
    assert sum("team" in found for found in kinds) == 2
    top = json.loads(cli("top", "--output", "json").stdout)
    assert any(job["message"].startswith(f"waits: {says}") for job in top["jobs"])
    assert held(cli) == {"text": 4, "vision": 0, "web": 0}
    assert [team["used"] for team in top["teams"]] == [4, 0, 0]
    once = cli("top", "--once").stdout
    assert "Teams: 4 slots used" in once
    assert re.search(r"(?m)^text +2 +4 +2 ", once)
    assert "must return borrowed slots" in cli("events").stdout

    # The file is read again; one that is wrong changes nothing.
    (cli.folder / "teams.yaml").write_text(TEAMS.format(notice="soon", more=""))
    server = cli.servers[-1]
    wait_until(lambda: "the teams stay as they are" in server.errors)
    (cli.folder / "teams.yaml").write_text(TEAMS.format(notice="0s", more=""))
    wait_until(lambda: held(cli) == {"text": 2, "vision": 2, "web": 0})


def test_what_teams_never_let_run_is_refused(cli: Cli) -> None:
    cli.program = LIGHT
    cli.serve("--interval", "0.5")
    mine = jobs_file(cli, "mine.yaml", "name: mine, team: text")
    assert "no teams are set" in one_sentence(cli("submit", mine), 1)
    (cli.folder / "teams.yaml").write_text(TEAMS.format(notice="60s", more=", max_submit_jobs: 1"))
    assert "4 slots" not in cli("teams", "--set", "teams.yaml").stdout
    assert "team: 'tex' is not known" in one_sentence(cli("submit", mine, "--team", "tex"), 1)
    said = one_sentence(cli("submit", mine, "--priority", "high"), 1)
    assert "priority: 'high' is not known; choose from urgent" in said
    none = jobs_file(cli, "none.yaml", "name: none, team: web")
    assert "max_jobs of team 'web' is 0" in one_sentence(cli("submit", none), 1)
    wide = jobs_file(cli, "wide.yaml", "name: wide, team: vision, min_replicas: 3")
    said = one_sentence(cli("submit", wide), 1)
    assert "needs 3 slots at least, and max_slots_per_job of team 'vision' allow 2" in said
    cli("submit", mine, "--priority", "urgent")
    wait_until(lambda: held(cli)["text"] == 1)
    moved = cli("update", "mine", "--team", "vision")
    assert moved.stdout == "mine: The job belongs to team vision.\n"
    assert (held(cli)["text"], held(cli)["vision"]) == (0, 1)
    more = jobs_file(cli, "more.yaml", "name: m1, team: text", "name: m2, team: text")
    assert "may have 1 unfinished job" in one_sentence(cli("submit", more), 1)
    assert re.search(r"(?m)^text .* 0 of 1 ", cli("teams").stdout)
    assert "No teams" in cli("teams", "--clear").stdout


@pytest.mark.exhaustive
def test_a_user_with_a_token_submits_for_its_team(cli: Cli) -> None:
    cli.program = LIGHT
    (cli.folder / "teams.yaml").write_text(TEAMS.format(notice="60s", more=""))
    cli.serve("--teams", "teams.yaml", "--interval", "0.5")
    assert "No tokens but the admin's" in cli("tokens").stdout
    assert "needs the NAME" in one_sentence(cli("tokens", "create"), 2)
    assert "is not the name of a user" in one_sentence(cli("tokens", "create", "a b"), 2)
    token = cli("tokens", "create", "ana", "--team", "text").stdout.strip()
    (cli.folder / "token").write_text(token)
    told = json.loads((cli.state_dir / "server.json").read_text())
    asks = ("--server", told["url"], "--token-file", "token")
    mine = jobs_file(cli, "mine.yaml", "name: mine")
    assert cli(*asks, "submit", mine).returncode == 0
    wait_until(lambda: held(cli)["text"] == 1)
    assert cli.jobs()["mine"]["spec"]["user"] == "ana"
    refused = one_sentence(cli(*asks, "drain", "node-a"), 1)
    assert "the token of 'ana' has the role user, and this needs admin" in refused
    assert "ana" in cli("tokens").stdout
    cli("tokens", "revoke", "ana")
    assert cli(*asks, "cancel", "mine").returncode == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("teams: [{name: a, quota: -1}]", "teams[0].quota: -1 is not allowed; it must be a whole"),
        ("teams: [{name: a}, {name: a}]", "teams[1].name: 'a' is also the name of teams[0]"),
        ("teams: [{name: a, quotas: 1}]", "unknown field; did you mean 'quota'?"),
        ("teams: [{name: a}]\ndefault: b", "default: 'b' is none of the teams; name one of a"),
        ("teams: []\nnotice: soon", "notice: "),
        (
            "teams: []\npriorities: [{name: urgent, value: 1, users: [a b]}]",
            "priorities[0].users[0]: 'a b' is not the name of a user",
        ),
    ],
)
def test_files_that_are_wrong(cli: Cli, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "teams.yaml").write_text(text)
    said = one_sentence(cli("teams", "--set", "teams.yaml"), 2)
    assert "teams.yaml:" in said
    assert says in said
