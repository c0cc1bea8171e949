"""The options of `serve` about its address: where it listens, what jobs are told, certificates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from pipollux_sched.client.connection import ClientError, checked_url
from pipollux_sched.server.address import ServerAddress
from pipollux_sched.server.tls import Tls

from .console import warn

_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|\[?[0-9A-Fa-f:.]+\]?")

Host: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on; 0.0.0.0 for all of this machine's.",
    ),
]
Port: TypeAlias = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")
]
AdvertiseUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="What jobs are told to report to, say the URL of a proxy.",
        show_default="the address that is listened on; for 0.0.0.0 this host's name",
    ),
]
TlsCert: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Certificate to show, in PEM format.", show_default="plain HTTP"
    ),
]
TlsKey: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Private key of the certificate.", show_default=False),
]
TlsCa: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificates of the authorities that jobs and commands trust.",
        show_default="those of their systems",
    ),
]
AllowHost: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Answer to this name, too, say that of a proxy; may be repeated.",
        show_default="names of the loopback interface, and those listened on or advertised",
    ),
]


def server_address(
    *,
    host: str,
    port: int,
    advertise_url: str | None,
    allowed_hosts: Sequence[str],
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
) -> ServerAddress:
    """Return the address that the options describe; warn where it is likely not what is meant.

    Raises:
        BadParameter: an option makes no sense, or lacks another.
        TlsError: a certificate cannot be used.
    """
    for name in (host, *allowed_hosts):
        option = "--host" if name is host else "--allow-host"
        _check_name(name, option, wildcard=name is not host)
    tls = _tls(tls_cert, tls_key, tls_ca)
    try:
        url = None if advertise_url is None else checked_url(advertise_url)
        address = ServerAddress(
            host=host.strip("[]"),
            port=port,
            advertise_url=url,
            allowed_hosts=allowed_hosts,
            tls=tls,
        )
    except (ClientError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="'--advertise-url'") from None
    if tls is None and not address.is_loopback:
        warn(
            f"--host {host}: tokens travel in clear, and the admin's opens everything; give "
            "--tls-cert and --tls-key, unless only trusted machines are on this network"
        )
    if tls is not None:
        tls.check()
        _warn_of_doubt(tls, address)
    return address


def _check_name(name: str, option: str, *, wildcard: bool) -> None:
    if not _HOST_NAME.fullmatch(name) or (name.startswith("*") and not wildcard):
        example = "pipollux.example.com or *.example.com" if wildcard else "10.0.0.5 or 0.0.0.0"
        raise typer.BadParameter(
            f"{name[:60]!r} is no name of a host; give it without port, as in {example}",
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
            f"--tls-ca: {tls.authority} does not vouch for {tls.certificate} at "
            f"{address.advertised_host} ({doubt}): jobs and commands will refuse it, unless a "
            "proxy shows them another"
        )
