"""Certificates for tests of https, made anew each time."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import trustme


class Certificates(NamedTuple):
    """The files of one certificate, and of the authority that has signed it."""

    certificate: Path
    key: Path
    authority: Path

    def options(self) -> list[str]:
        """The options of `pipollux serve` that name them."""
        return [
            *("--tls-cert", str(self.certificate), "--tls-key", str(self.key)),
            *("--tls-ca", str(self.authority)),
        ]


def make_certificates(
    folder: Path, *hosts: str, not_after: datetime.datetime | None = None
) -> Certificates:
    """Make a certificate for some hosts, in a folder that is made for it."""
    folder.mkdir(parents=True)
    found = Certificates(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    authority = trustme.CA()
    issued = authority.issue_cert(*hosts, not_after=not_after)
    issued.cert_chain_pems[0].write_to_path(str(found.certificate))
    issued.private_key_pem.write_to_path(str(found.key))
    authority.cert_pem.write_to_path(str(found.authority))
    return found
