"""A PostgreSQL server of the tests' own: in a temporary folder, reached by a Unix socket alone."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg

USER = "nobody"
"""Who runs the server where the tests are run by root, for whom it does not start."""
PROGRAMS = ("initdb", "postgres", "setpriv")
TIMEOUT = 240.0


def find(program: str) -> str | None:
    """Where a program is: in PATH, or where Debian has those of each version's server."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: path.parent.name)
    return shutil.which(program) or shutil.which(
        program, path=os.pathsep.join(map(str, reversed(versions)))
    )


def why_not() -> str | None:
    """Say why there is no server, None if there can be one."""
    missing = [program for program in PROGRAMS if find(program) is None]
    return f"no program is named {' or '.join(missing)}" if missing else None


class Server:
    """A running server; it ends with `stop`, and with the thread that started it.

    Databases are made by `new_database`, each for one test.
    """

    def __init__(self) -> None:
        # Not in pytest's folder, which is closed to the other user; short, as sockets' names are.
        self.folder = Path(tempfile.mkdtemp(prefix="pipollux-pg-", dir="/tmp"))
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            if os.geteuid() == 0:
                shutil.chown(self.folder, USER)
            setup = ("-U", "pipollux", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
            subprocess.run(
                self._command("initdb", "-D", str(self.folder / "data"), *setup),
                check=True,
                cwd=self.folder,
                stdout=subprocess.DEVNULL,
                timeout=TIMEOUT,
            )
            self.start()
        except BaseException:  # also Ctrl-C: no server stays behind
            self.remove()
            raise

    def _command(self, program: str, *args: str) -> list[str]:
        # A run of pytest that is killed takes the server with it.
        ends_with_us = ("setpriv", "--pdeathsig", "QUIT")
        other = ("--reuid", USER, "--clear-groups") if os.geteuid() == 0 else ()
        return [*ends_with_us, *other, str(find(program)), *args]

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = (
            *("-D", str(self.folder / "data"), "-k", str(self.folder)),
            *("-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=50"),
        )
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", *options), cwd=self.folder, stdout=log, stderr=log
            )
        ready = self.folder / "data" / "postmaster.pid"
        while not (ready.is_file() and "ready" in ready.read_text()):
            try:
                self._process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError((self.folder / "log").read_text())

    def stop(self) -> None:
        """End the server and whoever is connected to it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(TIMEOUT)
            self._process = None

    def remove(self) -> None:
        """End the server, and delete everything."""
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database, with a password that must not be seen anywhere."""
        return f"postgresql://pipollux:hunter2@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """Make an empty database, and return its URL."""
        name = f"store_{next(self._numbers)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)

    def end_connections(self) -> None:
        """End whatever is connected, as a test has to when it is over."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
