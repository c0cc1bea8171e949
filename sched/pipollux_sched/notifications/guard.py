"""Confinement of the process that sends notifications, whose destinations users choose.

An audit hook of the interpreter sees each connection with its address, after the resolution of
names, so that neither a redirect nor a change of a name's address leads elsewhere. It also refuses
Unix sockets, other programs, writes, and reads of files besides those of Python and of TLS: options
in URLs of Apprise name templates and keys on this machine.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
from typing import Any

from .hosts import HostRules

_STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.fork")
_CONNECTS = ("socket.connect", "socket.sendto", "socket.sendmsg")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod")
_SYSTEM_FILES = ("/etc/mime.types", "/etc/hosts", "/etc/resolv.conf", "/dev/null", "/dev/urandom")


class Guard:
    """Refuses what the sending of a notification does not need; in force once installed."""

    def __init__(self, rules: HostRules) -> None:
        self._rules = rules
        self._resolved: set[str] = set()
        self._readable = _readable()
        self._local = threading.local()
        self.refused: str | None = None
        """The first refused address since `forget`, in words; None: none was refused."""
        self.withheld = False
        """Whether a file, a program or a local socket was refused since."""

    def install(self) -> None:
        """Confine this process, for good."""
        resolve = socket.getaddrinfo

        def noting(host: Any, *args: Any, **options: Any) -> Any:
            found = resolve(host, *args, **options)
            if isinstance(host, str) and self._rules.names(host):
                self._resolved |= {str(entry[4][0]) for entry in found}
            return found

        socket.getaddrinfo = noting
        sys.addaudithook(self._look)

    def forget(self) -> None:
        """Begin another notification."""
        self.refused, self.withheld = None, False
        self._resolved.clear()

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _CONNECTS:
            self._connect(args[1])
        elif event == "open":
            self._open(*args)
        elif event in _STARTS or event in _CHANGES:
            self._withhold()

    def _connect(self, address: Any) -> None:
        if not isinstance(address, tuple):
            self._withhold()
        host = str(address[0])
        if host not in self._resolved and not self._rules.allows_address(host):
            why = f"{host} is not an address that an admin allows with serve --notify-host"
            self.refused = self.refused or why
            raise PermissionError(why)

    def _open(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int):
            return
        # Not resolved: installers link files of packages to a cache.
        text = os.path.abspath(os.fsdecode(path))
        writes = (isinstance(mode, str) and any(one in mode for one in "wax+")) or (
            isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if text not in _SYSTEM_FILES and (writes or not text.startswith(self._readable)):
            self._withhold()

    def _withhold(self) -> None:
        self.withheld = True
        raise PermissionError("notifications use no files and programs of this machine")


def _readable() -> tuple[str, ...]:
    paths = [entry for entry in sys.path if entry and os.path.isabs(entry)]
    verify = ssl.get_default_verify_paths()
    paths += [
        entry
        for entry in (verify.cafile, verify.capath, verify.openssl_cafile, verify.openssl_capath)
        if entry
    ]
    paths += ["/usr/share/zoneinfo", "/etc/ssl", "/etc/pki"]
    found = {os.path.abspath(path) for path in paths} - {"/"}
    return tuple(path if os.path.isfile(path) else f"{path}/" for path in sorted(found))
