"""The listening address of a scheduler, and its URL for jobs and users."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil

from pipollux_protocol import environment as variables
from pipollux_sched.store import ServerInfo

from .tls import Tls


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """The listening address of a scheduler, and the URL that jobs report to.

    Example:
        >>> ServerAddress(host="10.0.0.5", port=7070).advertised(7070)
        'http://10.0.0.5:7070'

    Raises:
        ValueError: the certificate is for https, and `advertise_url` is not.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or ::, all addresses of the machine."""
    port: int = 0
    """Port to listen on; 0: any free port."""
    advertise_url: str | None = None
    """URL for jobs and commands; None: the listening address, or the host name for a wildcard."""
    allowed_hosts: Sequence[str] = ()
    tls: Tls | None = None
    """The certificate; None: plain HTTP."""

    def __post_init__(self) -> None:
        if self.tls and self.advertise_url and urlsplit(self.advertise_url).scheme != "https":
            raise ValueError(
                f"{self.advertise_url} begins with http://, but with a certificate the scheduler "
                "serves HTTPS only; give a URL that begins with https://"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_wildcard(self) -> bool:
        """Whether the address stands for all addresses of the machine."""
        try:
            return ip_address(self.host).is_unspecified
        except ValueError:
            return self.host == ""

    def advertised(self, port: int) -> str:
        """Return the URL that jobs report to, without a trailing slash."""
        if self.advertise_url is not None:
            return self.advertise_url.rstrip("/")
        host = socket.gethostname() if self.is_wildcard else self.host
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def advertised_host(self) -> str:
        """The host of the URL that jobs report to."""
        return urlsplit(self.advertised(0)).hostname or ""

    def hosts(self) -> list[str]:
        """Return the accepted host names, besides those of the loopback interface.

        With a wildcard address all addresses are accepted: DNS rebinding needs a host name.
        """
        names = [self.host, *self.allowed_hosts, self.advertised_host]
        if self.is_wildcard:
            names += (
                entry.address.partition("%")[0]
                for entries in psutil.net_if_addrs().values()
                for entry in entries
                if entry.family in (socket.AF_INET, socket.AF_INET6)
            )
        return list(dict.fromkeys(name for name in names if name))

    def server_info(self, port: int, token: str) -> ServerInfo:
        """Return what commands of this machine need to connect."""
        authority = self.environment(port).get(variables.CA_FILE.name)
        return ServerInfo(
            self.advertised(port), os.getpid(), token, port, authority, self.is_wildcard
        )

    def environment(self, port: int) -> dict[str, str]:
        """Return the environment variables with the URL that a job reports to."""
        found = variables.SCHEDULER_URL.write(self.advertised(port))
        if self.tls is not None and self.tls.authority is not None:
            found |= variables.CA_FILE.write(self.tls.authority.absolute())
        return found
