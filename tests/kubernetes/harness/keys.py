"""The keys of a control plane: two authorities, and a certificate for each who speaks to it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30")


class Keys:
    """Certificates in a folder.

    Args:
        folder: for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        for name in ("ca", "front"):
            key = ["-keyout", self.key(name), "-out", self.certificate(name)]
            _openssl("req", "-x509", *_KEY, "-subj", f"/CN={name}", *key)
        _openssl(
            "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.key("accounts")
        )
        _openssl("ec", "-in", self.key("accounts"), "-pubout", "-out", str(folder / "accounts.pub"))

    def key(self, name: str) -> str:
        """Return the file of someone's key."""
        return str(self._folder / f"{name}.key")

    def certificate(self, name: str) -> str:
        """Return the file of someone's certificate."""
        return str(self._folder / f"{name}.crt")

    @property
    def accounts(self) -> str:
        """The file of the public key that tokens of service accounts are checked with."""
        return str(self._folder / "accounts.pub")

    def issue(
        self, name: str, subject: str, names: Sequence[str] = (), authority: str = "ca"
    ) -> None:
        """Make a key and its certificate.

        Args:
            name: of the files.
            subject: whom it speaks for, such as "/O=system:masters/CN=admin".
            names: what it serves as, such as "IP:127.0.0.1".
            authority: who signs.
        """
        request = str(self._folder / f"{name}.csr")
        extensions = self._folder / f"{name}.ext"
        served = ",".join([f"DNS:{name}", *names])
        extensions.write_text(f"subjectAltName={served}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", *_KEY[:-2], "-subj", subject, "-keyout", self.key(name), "-out", request)
        signed = ["-CA", self.certificate(authority), "-CAkey", self.key(authority)]
        signed += ["-CAcreateserial", "-days", "30", "-extfile", str(extensions)]
        _openssl("x509", "-req", "-in", request, *signed, "-out", self.certificate(name))

    def kubeconfig(self, name: str, server: str, path: Path) -> Path:
        """Write the file with which someone finds an API server, and return its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [
                {
                    "name": "it",
                    "cluster": {"server": server, "certificate-authority": self.certificate("ca")},
                }
            ],
            "users": [
                {
                    "name": "it",
                    "user": {
                        "client-certificate": self.certificate(name),
                        "client-key": self.key(name),
                    },
                }
            ],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
