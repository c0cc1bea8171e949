"""The certificate of a scheduler, checked by a handshake in memory before the server listens."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pipollux_sched.errors import SchedulerError

__all__ = ["Tls", "TlsError"]


class TlsError(SchedulerError):
    """A certificate cannot be used; the text is one sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The files of a server's certificate, in PEM format.

    Example:
        >>> Tls(certificate=Path("server.pem"), key=Path("server.key")).check()
    """

    certificate: Path
    """The certificate, followed by any intermediate certificates."""
    key: Path
    """Its unencrypted private key."""
    authority: Path | None = None
    """Certificates of the authorities that jobs and commands trust; None: the system's."""

    def check(self) -> None:
        """Refuse files that no client would accept.

        Raises:
            TlsError: a file cannot be read or holds something else, the key belongs to another
                certificate, or the certificate is not valid now.
        """
        _read(self.certificate, "--tls-cert", "CERTIFICATE-----", "a certificate")
        key = _read(self.key, "--tls-key", "PRIVATE KEY-----", "a private key")
        if "ENCRYPTED" in key:
            raise TlsError(
                f"--tls-key: {self.key} is encrypted, but nobody can type its passphrase; "
                "give a decrypted copy that only the scheduler's user can read"
            )
        if self.authority is not None:
            _read(self.authority, "--tls-ca", "CERTIFICATE-----", "a certificate")
            _trusting(self.authority, "--tls-ca")
        # Trusted by itself: an unknown authority is no reason to refuse, only its dates and use.
        client = _trusting(self.certificate, "--tls-cert")
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        problem = _handshake(client, self._server(), None)
        if problem is not None:
            raise TlsError(
                f"--tls-cert: {self.certificate} cannot be used: {problem}; give one that is valid"
            )

    def doubt(self, host: str) -> str | None:
        """Return why jobs could not verify the certificate for a host; None if they can or may."""
        if self.authority is None:
            return None
        client = _trusting(self.authority, "--tls-ca")
        client.check_hostname = True
        return _handshake(client, self._server(), host)

    def _server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise TlsError(
                    f"--tls-key: {self.key} is not the key of the certificate {self.certificate}; "
                    "give the two files that belong together"
                ) from None
            raise TlsError(
                f"--tls-cert: {self.certificate} and --tls-key: {self.key} cannot be used: "
                f"{_words(error)}; give files in PEM format"
            ) from None
        return context


def _read(path: Path, option: str, wanted: str, what: str) -> str:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise TlsError(
            f"{option}: {path} cannot be read ({error.strerror}); give a file with {what}"
        ) from None
    if wanted not in text:
        raise TlsError(f"{option}: {path} holds no {what[2:]}; give a file in PEM format with one")
    return text


def _trusting(path: Path, option: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise TlsError(
            f"{option}: {path} cannot be used: {_words(error)}; give a file in PEM format"
        ) from None
    return context


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, host: str | None) -> str | None:
    """Perform a TLS handshake in memory; return the client's objection."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=host)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (asking, answering) * 4:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError as error:
            return _words(error)
    return None


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
