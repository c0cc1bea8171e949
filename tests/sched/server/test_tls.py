"""Certificates: which are refused, and in which words; and a server that shows one."""

from __future__ import annotations

import datetime
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.supervisor_client import supervisor_client
from pipollux_sched.client.client import Client
from pipollux_sched.client.connection import ClientError, UnreachableError
from pipollux_sched.server.http_server import HttpServer
from pipollux_sched.server.tls import Tls, TlsError
from tests.certificates import Certificates, make_certificates
from tests.waiting import until

PATIENCE = 240.0


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "valid", "localhost", "127.0.0.1")


def tls(files: Certificates, **changes: Path | None) -> Tls:
    return Tls(**{**files._asdict(), **changes})


def refusal(given: Tls) -> str:
    with pytest.raises(TlsError) as refused:
        given.check()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_certificate_that_is_valid(valid: Certificates) -> None:
    tls(valid).check()
    tls(valid, authority=None).check()
    assert tls(valid).doubt("localhost") is None
    assert tls(valid).doubt("127.0.0.1") is None
    assert tls(valid, authority=None).doubt("elsewhere") is None, "their systems decide"


def test_what_its_authority_does_not_vouch_for(valid: Certificates, tmp_path: Path) -> None:
    assert "not valid for 'node-1'" in (tls(valid).doubt("node-1") or "")
    other = make_certificates(tmp_path / "other", "localhost")
    doubt = tls(valid, authority=other.authority).doubt("localhost")
    assert doubt == "unable to get local issuer certificate"


def test_keys_and_certificates_that_do_not_belong_together(
    valid: Certificates, tmp_path: Path
) -> None:
    other = make_certificates(tmp_path / "other", "localhost")
    assert refusal(tls(valid, key=other.key)) == (
        f"--tls-key: {other.key} is not the key of the certificate {valid.certificate}; give the "
        "two files that belong together"
    )


def test_a_certificate_that_has_expired(tmp_path: Path) -> None:
    yesterday = datetime.datetime.now(tz=datetime.UTC) - datetime.timedelta(days=1)
    old = make_certificates(tmp_path / "old", "localhost", not_after=yesterday)
    assert refusal(tls(old)) == (
        f"--tls-cert: {old.certificate} cannot be used: certificate has expired; give one that is "
        "valid"
    )


@pytest.mark.parametrize(
    ("field", "option"),
    [("certificate", "--tls-cert"), ("key", "--tls-key"), ("authority", "--tls-ca")],
)
def test_files_that_hold_something_else(
    valid: Certificates, tmp_path: Path, field: str, option: str
) -> None:
    missing = tmp_path / "missing.pem"
    said = refusal(tls(valid, **{field: missing}))
    assert said.startswith(f"{option}: {missing} cannot be read (No such file or directory); give")
    empty = tmp_path / "empty.pem"
    empty.write_text("hello")
    what = "private key" if field == "key" else "certificate"
    said = refusal(tls(valid, **{field: empty}))
    assert said == f"{option}: {empty} holds no {what}; give a file in PEM format with one"
    broken = tmp_path / "broken.pem"
    good = Path(getattr(valid, field)).read_text()
    broken.write_text(good[:100] + "!!" + good[102:])
    said = refusal(tls(valid, **{field: broken}))
    assert str(broken) in said
    assert "cannot be used" in said


def test_a_key_with_a_passphrase(valid: Certificates, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    assert "is encrypted, but nobody can type" in refusal(tls(valid, key=key))


def test_a_server_that_shows_it(valid: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    server = HttpServer(PlainTextResponse("hello"), "127.0.0.1", 0, tls=tls(valid))
    server.start()
    try:
        assert server.url == f"https://127.0.0.1:{server.port}"
        env = {"PIPOLLUX_CA_FILE": str(valid.authority), "PIPOLLUX_TOKEN": "mine"}
        with supervisor_client(JobEnvironment.read(env), timeout=PATIENCE) as client:
            assert client.get(server.url).text == "hello"
            assert client.headers["Authorization"] == "Bearer mine"
        with (
            supervisor_client(JobEnvironment.read({}), timeout=PATIENCE) as client,
            pytest.raises(httpx.ConnectError, match="unable to get local issuer"),
        ):
            client.get(server.url)
        with (
            Client.at(server.url, "t", ca_file=valid.authority) as asking,
            pytest.raises(ClientError, match="is not a scheduler"),
        ):
            asking.jobs()
        with (
            Client.at(server.url, "t") as asking,
            pytest.raises(UnreachableError, match=r"cannot be verified.*--ca-file"),
        ):
            asking.jobs()
        with (
            Client.at(
                f"https://[::ffff:127.0.0.1]:{server.port}", "t", ca_file=valid.authority
            ) as asking,
            pytest.raises(UnreachableError, match="is for another name"),
        ):
            asking.jobs()
        with httpx.Client(trust_env=False) as plain, pytest.raises(httpx.RemoteProtocolError):
            plain.get(f"http://127.0.0.1:{server.port}", timeout=PATIENCE)
    finally:
        server.stop()


def test_who_does_not_shake_hands_is_let_go(valid: Certificates) -> None:
    server = HttpServer(
        PlainTextResponse("hello"), "127.0.0.1", 0, tls=tls(valid), head_timeout=0.2
    )
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as mute:
            assert mute.recv(1) == b"", "it was closed"
        context = ssl.create_default_context(cafile=valid.authority)

        def shaken() -> ssl.SSLSocket:
            raw = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
            return context.wrap_socket(raw, server_hostname="127.0.0.1")

        # On a busy machine shaking hands may take longer than the server waits.
        with until(shaken, "hands are shaken in time", ignored=(OSError,)) as silent:
            assert silent.recv(1) == b""
    finally:
        server.stop()


def test_what_jobs_and_commands_are_to_trust(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    for there, reason in ((False, "No such file or directory"), (True, "it holds none")):
        if there:
            nothing.touch()
        with pytest.raises(ConfigurationError) as wrong:
            JobEnvironment.read({"PIPOLLUX_CA_FILE": str(nothing)})
        assert str(wrong.value).startswith(f"environment variable PIPOLLUX_CA_FILE='{nothing}'")
        assert f"({reason})" in str(wrong.value)
        with pytest.raises(ClientError, match=r"--ca-file: .* cannot be used") as refused:
            Client.at("https://localhost:1", "t", ca_file=nothing)
        assert f"({reason})" in str(refused.value)
