"""Options of `serve` about its server: listening address, advertised URL, certificates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from pipollux_sched.client.connection import ClientError, checked_url
from pipollux_sched.server.address import ServerAddress
from pipollux_sched.server.tls import Tls

from .console import warn

_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|\[?[0-9A-Fa-f:.]+\]?")


@dataclass(frozen=True, kw_only=True)
class AddressFlags:
    """Options of `serve` about its server."""

    panel: ClassVar[str] = "Server and TLS"
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on; 0.0.0.0 for all addresses of this machine.",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for any free port."),
    ] = 0
    advertise_url: Annotated[
        str | None,
        typer.Option(
            "--advertise-url",
            metavar="URL",
            help="URL that jobs report to, such as the URL of a proxy.",
            show_default="the listening address; for 0.0.0.0 the name of this host",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Additional host name to accept in requests, such as a proxy's; may be repeated.",
            show_default="loopback names, and the listening and advertised names",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="TLS certificate of the server, in PEM format.",
            show_default="plain HTTP",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key", metavar="FILE", help="Private key of the certificate.", show_default=False
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            help="Certificates of the authorities that jobs and commands trust.",
            show_default="the authorities of their systems",
        ),
    ] = None
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Serve /metrics without authentication.")
    ] = False


def server_address(given: AddressFlags) -> ServerAddress:
    """Return the address that the options describe; warn about probable mistakes.

    Raises:
        BadParameter: an option is invalid, or requires another one.
        TlsError: a certificate cannot be used.
    """
    host, allowed_hosts = given.host, given.allow_host or ()
    for name in (host, *allowed_hosts):
        option = "--host" if name is host else "--allow-host"
        _check_name(name, option, wildcard=name is not host)
    tls = _tls(given.tls_cert, given.tls_key, given.tls_ca)
    try:
        url = None if given.advertise_url is None else checked_url(given.advertise_url)
        address = ServerAddress(
            host=host.strip("[]"),
            port=given.port,
            advertise_url=url,
            allowed_hosts=allowed_hosts,
            tls=tls,
        )
    except (ClientError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="'--advertise-url'") from None
    if tls is None and not address.is_loopback:
        warn(
            f"--host {host}: tokens are sent unencrypted; give "
            "--tls-cert and --tls-key, unless all machines on this network are trusted"
        )
    if tls is not None:
        tls.check()
        _warn_of_doubt(tls, address)
    return address


def _check_name(name: str, option: str, *, wildcard: bool) -> None:
    if not _HOST_NAME.fullmatch(name) or (name.startswith("*") and not wildcard):
        example = "pipollux.example.com or *.example.com" if wildcard else "10.0.0.5 or 0.0.0.0"
        raise typer.BadParameter(
            f"{name[:60]!r} is not a host name; give it without a port, as in {example}",
            param_hint=f"'{option}'",
        )


def _tls(certificate: Path | None, key: Path | None, authority: Path | None) -> Tls | None:
    if certificate is not None and key is not None:
        return Tls(certificate=certificate, key=key, authority=authority)
    given = {"--tls-cert": certificate, "--tls-key": key, "--tls-ca": authority}
    first = next((option for option, file in given.items() if file is not None), None)
    if first is None:
        return None
    missing = [option for option in ("--tls-cert", "--tls-key") if given[option] is None]
    raise typer.BadParameter(f"needs {' and '.join(missing)}, too", param_hint=f"'{first}'")


def _warn_of_doubt(tls: Tls, address: ServerAddress) -> None:
    doubt = tls.doubt(address.advertised_host)
    if doubt is not None:
        warn(
            f"--tls-ca: {tls.authority} does not verify {tls.certificate} for "
            f"{address.advertised_host} ({doubt}): jobs and commands will reject it, unless a "
            "proxy presents another certificate"
        )
