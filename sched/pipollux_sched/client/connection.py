"""One connection to a scheduler: requests, and errors in one sentence each."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from pipollux_sched.errors import SchedulerError

TIMEOUT = 30.0

T = TypeVar("T")


class ClientError(SchedulerError):
    """The scheduler is unreachable, or refuses; the text is one sentence for the user."""


class UnreachableError(ClientError):
    """No scheduler answers, so further requests are pointless."""


class RefusedConflictError(ClientError):
    """The request conflicts with the state of a job, such as a name that is taken."""


class Connection:
    """Connection to a scheduler with its admin token.

    Args:
        nobody: error text if nothing answers.
        ca_file: certificates of the authorities to trust; None: the system's.
        by_proxy: use a proxy from the environment; never for loopback addresses.

    Raises:
        ClientError: the URL or the token is malformed, the file holds no certificates, or the proxy
            cannot be used.
    """

    def __init__(
        self,
        url: str,
        token: str,
        timeout: float = TIMEOUT,
        nobody: str | None = None,
        ca_file: Path | None = None,
        *,
        by_proxy: bool = True,
    ) -> None:
        self.url = checked_url(url)
        self._nobody = nobody or (
            f"no scheduler answers at {self.url}; check the URL, the scheduler, and the network "
            "between"
        )
        if not token or not (token.isascii() and token.isprintable()) or " " in token:
            raise ClientError(
                "the token is not one line of printable ASCII without blanks; take it from "
                "admin.token in the scheduler's state directory"
            )
        trust_env = by_proxy and not is_loopback(self.url)
        headers = {"Authorization": f"Bearer {token}"}
        self._patience = timeout
        verify: ssl.SSLContext | bool = True
        if ca_file is not None:
            verify = _trusting(ca_file)
        elif not trust_env and self.url.startswith("http:"):
            # There is no TLS, also to no proxy; reading the authorities would take 20 ms.
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout,
                trust_env=trust_env,
                verify=verify,
            )
        except (ImportError, ValueError) as error:  # of the proxy's URL
            raise ClientError(
                "the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used "
                f"({str(error).rstrip('.')}); name one that begins with http://, or put "
                f"{urlsplit(self.url).hostname} into NO_PROXY"
            ) from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def get(self, kind: type[T], method: str, path: str, **content: Any) -> T:
        """Send a GET request; return the answer validated as the expected type."""
        response = self.request(method, path, **content)
        try:
            # Extra fields of a newer scheduler are ignored.
            found: T = _adapter(cast("Any", kind)).validate_json(response.content, extra="ignore")
        except ValidationError:
            raise self.not_understood() from None
        return found

    def lines(self, path: str, query: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of an answer as they arrive, until it ends."""
        with self._answers(), self._client.stream("GET", path, params=query) as response:
            if not response.is_success:
                response.read()
                raise self._refused(response)
            yield from response.iter_lines()

    def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Send a request, repeatedly to an overloaded scheduler; raise `ClientError`."""
        deadline = time.monotonic() + self._patience
        while True:
            with self._answers():
                response = self._client.request(method, path, **content)
            if response.is_success:
                return response
            pause = _pause(response)
            if pause is None or time.monotonic() + pause > deadline:
                raise self._refused(response)
            time.sleep(pause)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
            if "mismatch" in str(error).lower():
                raise UnreachableError(
                    f"the certificate of {self.url} is for another name ({error}); give a URL with "
                    "a name that it is for"
                ) from None
            if "certificate" in str(error).lower():
                raise UnreachableError(
                    f"the certificate of {self.url} cannot be verified ({error}); if a "
                    "private authority has signed it, give its file with --ca-file or in "
                    "PIPOLLUX_CA_FILE"
                ) from None
            raise UnreachableError(self._nobody) from None
        except httpx.HTTPError as error:
            raise ClientError(
                f"the scheduler at {self.url} did not answer in time "
                f"({error or type(error).__name__})"
            ) from error

    def _refused(self, response: httpx.Response) -> ClientError:
        try:
            detail = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            detail = ""
        if response.status_code == httpx.codes.UNAUTHORIZED:
            return ClientError(
                f"{self.url} refuses the token; give the one in admin.token of its scheduler's "
                "state directory, or a user's, with --token-file or PIPOLLUX_TOKEN"
            )
        if not detail:
            return ClientError(
                f"{self.url} answered with status {response.status_code}; is it a scheduler's?"
            )
        if response.status_code == httpx.codes.NOT_FOUND and detail.startswith("there is no path"):
            return self.not_understood()
        if response.status_code == httpx.codes.CONFLICT:
            return RefusedConflictError(detail)
        return ClientError(detail)

    def not_understood(self) -> ClientError:
        """Return an error: the server is not a scheduler, or has another version."""
        ours = version("pipollux")
        with self._answers():
            response = self._client.get("/healthz")
        try:
            theirs = str(response.json()["version"])[:40]
        except (ValueError, KeyError, TypeError):
            theirs = ""
        if not theirs.isprintable() or not theirs:
            return ClientError(f"the server at {self.url} is not a scheduler; check the URL")
        return ClientError(
            f"the scheduler at {self.url} is pipollux {theirs}, this is {ours}, and they are not "
            "compatible; install the same version here"
        )


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked_url(url: str) -> str:
    """Return a scheduler's URL without the trailing slash."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and url.isprintable() and " " not in url and bool(httpx.URL(url))
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good:
        raise ClientError(
            f"{url!r} is not the URL of a scheduler; give one such as https://HOST:PORT"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ClientError(
            "the URL of a scheduler has no user, password, query or fragment; give the token "
            "in a file with --token-file, or in PIPOLLUX_TOKEN"
        )
    return url.rstrip("/")


def is_loopback(url: str) -> bool:
    """Return whether a URL names this machine by its loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _pause(response: httpx.Response) -> float | None:
    """Return the seconds after which to retry at a busy scheduler; None: it is not busy."""
    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        return None
    try:
        return max(float(response.headers["Retry-After"]), 0.0)
    except (KeyError, ValueError):  # it is stopping, or a proxy sends a date
        return None


def _trusting(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl's error is a subclass
        reason = "it holds none" if isinstance(error, ssl.SSLError) else error.strerror
        raise ClientError(
            f"--ca-file: {ca_file} cannot be used ({reason}); give a file of certificates in PEM "
            "format, in the option or in PIPOLLUX_CA_FILE"
        ) from None
