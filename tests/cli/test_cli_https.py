"""A scheduler on every address of its machine, with a certificate, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from pipollux_sched.cli import main
from pipollux_sched.store import StateDir
from tests.certificates import Certificates, make_certificates
from tests.programs import free_port

from .runner import Cli, one_sentence, wait_until
from .test_cli_remote import being_elsewhere, live_two_jobs

EVERYWHERE = "0.0.0.0"  # noqa: S104  # what is tested


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "valid", "localhost")


def serve(cli: Cli, files: Certificates, port: int, host: str = EVERYWHERE) -> str:
    """Start a scheduler; return its URL."""
    url = f"https://localhost:{port}"
    options = ("--host", host, "--port", str(port), "--advertise-url", url, *files.options())
    cli.serve("--interval", "1", *options, at=f"{url} (listening on {host}:{port}), state in")
    assert not any("Warning" in line for line in cli.said)
    return url


@pytest.mark.exhaustive
def test_every_command_over_https(cli: Cli, files: Certificates, tmp_path: Path) -> None:
    url = serve(cli, files, free_port())
    with being_elsewhere(cli, tmp_path / "elsewhere") as elsewhere:
        assert elsewhere.url == url
        authority = elsewhere.environment.pop("PIPOLLUX_CA_FILE")
        unknown = one_sentence(elsewhere("jobs"), 1)
        assert f"the certificate of {url} cannot be verified" in unknown
        assert elsewhere.well("--ca-file", authority, "jobs").startswith("No jobs yet")
        elsewhere.environment["PIPOLLUX_CA_FILE"] = authority
        live_two_jobs(elsewhere, cli)


@pytest.mark.exhaustive
def test_a_job_reports_over_https_to_one_scheduler_after_the_other(
    cli: Cli, files: Certificates, repository: Path
) -> None:
    """The second listens elsewhere; it is the URL that jobs were told that counts."""
    port = free_port()
    serve(cli, files, port)
    script = repository / "examples" / "digits.py"
    job = {"name": "digits", "script": str(script), "args": ["--epochs", "100000"]}
    (cli.folder / "digits.yaml").write_text(json.dumps({"jobs": [job]}))
    done = cli("submit", "digits.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: cli.jobs()["digits"]["reason"] == "Training")
    killed = cli.servers[-1]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    url = serve(cli, files, port, "127.0.0.1")
    info = StateDir(cli.state_dir).read_server()
    assert info is not None
    assert (info.url, info.ca_file) == (url, str(files.authority))

    def look() -> dict[str, list[dict[str, float]]]:
        return dict(json.loads(cli("describe", "digits", "--output", "json").stdout))

    wait_until(lambda: look()["replicas"][0]["heard_seconds"] is not None)
    events = json.loads(f"[{','.join(_events(cli))}]")
    adopted = max(event["id"] for event in events if event["type"] == "adopted")
    wait_until(lambda: any(json.loads(line)["id"] > adopted for line in _events(cli, "progress")))
    assert cli.jobs()["digits"]["attempt"] == 1
    assert cli("cancel", "digits").returncode == 0
    wait_until(lambda: cli.jobs()["digits"]["phase"] == "Failed")


def _events(cli: Cli, *types: str) -> list[str]:
    wanted = [word for kind in types for word in ("--type", kind)]
    return cli("events", "--last", "1000", *wanted, "--output", "json").stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--tls-cert", "{cert}"], 2, "'--tls-cert': needs --tls-key, too"),
        (["--tls-key", "{key}"], 2, "'--tls-key': needs --tls-cert, too"),
        (["--tls-ca", "{ca}"], 2, "'--tls-ca': needs --tls-cert and --tls-key, too"),
        (["--tls-cert", "{ca}", "--tls-key", "{key}"], 1, "is not the key of the certificate"),
        (["--tls-cert", "none", "--tls-key", "{key}"], 1, "--tls-cert: none cannot be read (No"),
        (
            ["--tls-cert", "{cert}", "--tls-key", "{key}", "--advertise-url", "http://a:1"],
            2,
            "'--advertise-url': http://a:1 begins with http://, but with a certificate",
        ),
        (["--advertise-url", "a:1"], 2, "'--advertise-url': 'a:1' is not the URL of a scheduler"),
        (["--advertise-url", "http://me:x@a"], 2, "'--advertise-url': the URL of a scheduler"),
        (["--host", "http://a"], 2, "'--host': 'http://a' is not a host name"),
        (["--host", "*.a"], 2, "'--host': '*.a' is not a host name"),
        (["--host", "127.0.0.999"], 1, "cannot listen on 127.0.0.999:0 ("),
    ],
)
def test_mistakes(
    options: list[str],
    code: int,
    says: str,
    files: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("nodes:\n- {name: node-a, slots: 1, kind: cpu}\n")
    names = {"cert": files.certificate, "key": files.key, "ca": files.authority}
    line = ["serve", "--cluster", "c.yaml", "--state-dir", "state"]
    line += [word.format(**names) for word in options]
    with pytest.raises(SystemExit) as ended:
        main(line)
    said = capsys.readouterr().err.splitlines(keepends=True)
    errors = "".join(entry for entry in said if not entry.startswith("Warning: "))
    result = subprocess.CompletedProcess(line, int(ended.value.code or 0), "", errors)
    assert says in one_sentence(result, code)


def test_warnings(
    files: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each once, whatever comes after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPOLLUX_TOKEN", "t" * 32)
    serving = ["serve", "--state-dir", "state", "--host", "192.0.2.1"]
    tls = ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    doubtful = [*tls, "--tls-ca", str(files.authority), "--advertise-url", "https://other:1"]
    for line, warning in (
        (serving, "Warning: --host 192.0.2.1: tokens are sent unencrypted"),
        ([*serving, *tls], None),
        ([*serving, *doubtful], "Warning: --tls-ca: "),
        (
            ["--server", "http://nobody.invalid:1", "jobs"],
            "Warning: the token is sent unencrypted to",
        ),
        (
            ["--server", "http://nobody.invalid:1", "plan"],
            "Warning: the token is sent unencrypted to",
        ),
        (["--server", "http://127.0.0.1:1", "jobs"], None),
        (["--server", "https://nobody.invalid:1", "jobs"], None),
    ):
        with pytest.raises(SystemExit):
            main(line)
        said = capsys.readouterr().err.splitlines()
        warned = [entry for entry in said if entry.startswith("Warning: ")]
        if warning is None:
            assert warned == []
        else:
            assert len(warned) == 1
            assert warned[0].startswith(warning)
