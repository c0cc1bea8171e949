"""The state directory of a scheduler: its store, and the files of its jobs.

<state dir>/pipollux.db                     the store
<state dir>/store.url                       location of the store, if elsewhere (mode 0600)
<state dir>/lock                            held by the scheduler that serves this directory
<state dir>/admin.token                     the admin's token (mode 0600)
<state dir>/server.json                     URL and admin token (mode 0600)
<state dir>/CLUSTER.id                      this scheduler's name in a cluster, as in `ray.id`
<state dir>/jobs/NAME/checkpoints/          the job's checkpoints
<state dir>/jobs/NAME/checkpoints-G/        the same, after attempt G restarted from scratch
<state dir>/jobs/NAME/attempts/attempt-N/    the last launch, and the state of its processes
<state dir>/jobs/NAME/logs/attempt-N-replica-R.log    with renamed parts beside it (`log_files`)
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from platformdirs import user_state_path

from pipollux_utils.atomic_write import PRIVATE, write_aside
from pipollux_utils.paths import expanded
from pipollux_utils.text import count

from .errors import StateDirError
from .location import Location
from .ownership import make_private, open_private

_LOG = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "PIPOLLUX_STATE_DIR"
"""Variable with the state directory, unless an option is given."""

TOKEN_LENGTH = 32
"""Random bytes of the admin token, and its smallest number of characters."""
_IDENTITY = re.compile(r"[A-Za-z0-9]+")
_LOG_NAME = re.compile(r"attempt-(\d+)-replica-(\d+)\.log(?:\.from-\d+)?")


@dataclass(frozen=True)
class ServerInfo:
    """Address of the scheduler of a state directory."""

    url: str
    pid: int
    token: str
    """The admin token."""
    port: int = 0
    """The listening port, which the URL need not contain; 0: unknown."""
    ca_file: str | None = None
    """Certificates of the authorities to trust for the URL; None: the system's."""
    everywhere: bool = False
    """Whether the scheduler listens on all addresses of its machine."""

    @property
    def local_url(self) -> str:
        """URL for commands: the loopback interface on the same machine, if it is listened on."""
        parts = urlsplit(self.url)
        here = (parts.hostname or "") == socket.gethostname().lower()
        if self.everywhere and here and parts.scheme == "http" and self.port:
            return f"http://127.0.0.1:{self.port}"
        return self.url


@dataclass(frozen=True)
class StateDir:
    """The paths within a state directory.

    Example:
        >>> StateDir(Path("/var/lib/pipollux")).log("char-lm", 2, 0).name
        'attempt-2-replica-0.log'
    """

    path: Path
    """Absolute, because processes with other working directories use it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", expanded(self.path).resolve())

    @classmethod
    def choose(cls, path: Path | None = None) -> StateDir:
        """Return `path`, else PIPOLLUX_STATE_DIR, else the user's: `pipollux` in XDG_STATE_HOME."""
        named = path or os.environ.get(ENVIRONMENT_VARIABLE)
        return cls(Path(named) if named else user_state_path("pipollux", appauthor=False))

    @property
    def database(self) -> Path:
        """The database file, unless the store is elsewhere: see `store`."""
        return self.path / "pipollux.db"

    @property
    def store_url(self) -> Path:
        """The file with the location of a store that is elsewhere."""
        return self.path / "store.url"

    @property
    def store(self) -> Path | str:
        """Location to open `Store` with; raises `StateDirError` if its file cannot be read."""
        try:
            return self.store_url.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return self.database
        except (OSError, ValueError) as error:
            raise StateDirError(
                f"{self.store_url} cannot be read ({error}); it has the location of the store"
            ) from error

    def has_store(self) -> bool:
        """Return whether this directory has a store."""
        return self.store_url.exists() or self.database.exists()

    @property
    def server(self) -> Path:
        """The file with the address of the scheduler."""
        return self.path / "server.json"

    def job(self, name: str) -> Path:
        """Return the directory of a job."""
        return self.path / "jobs" / name

    def checkpoints(self, name: str, first_attempt: int = 1) -> Path:
        """Return the checkpoint directory of the run of a job that began with an attempt."""
        number = "" if first_attempt == 1 else f"-{first_attempt}"
        return self.job(name) / f"checkpoints{number}"

    def attempt(self, name: str, attempt: int) -> Path:
        """Return the directory of an attempt and its processes."""
        return self.job(name) / "attempts" / f"attempt-{attempt}"

    def log(self, name: str, attempt: int, replica: int) -> Path:
        """Return the log file of one replica of one attempt."""
        return self.job(name) / "logs" / f"attempt-{attempt}-replica-{replica}.log"

    def logs(self, name: str) -> list[tuple[int, int, Path]]:
        """Return the existing logs, as (attempt, replica, file) in that order."""
        found = set()
        for path in (self.job(name) / "logs").glob("attempt-*-replica-*.log*"):
            match = _LOG_NAME.fullmatch(path.name)
            if match:
                attempt, replica = int(match[1]), int(match[2])
                found.add((attempt, replica, self.log(name, attempt, replica)))
        return sorted(found)

    def create(self) -> None:
        """Create the directory, for its owner alone; restrict the mode of an existing one.

        Raises:
            StateDirError: it cannot be created or written to, belongs to another user, or is open
                to others and holds foreign files, to which others might lose access.
        """
        advice = "choose another with --state-dir"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateDirError(
                f"{self.path} cannot be made a state directory ({error.strerror}); {advice}"
            ) from error
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & 0o077 and self._holds_other_things():
            raise StateDirError(
                f"{self.path} is open to others (mode {mode:04o}) and holds other things than a "
                "scheduler's; choose an empty folder, or one to be made, with --state-dir"
            )
        make_private(self.path, advice)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise StateDirError(
                f"{self.path} is not writable for you; choose another with --state-dir"
            )

    def _holds_other_things(self) -> bool:
        names = {path.name for path in self.path.iterdir()}
        return bool(names) and not names & {self.database.name, self.store_url.name, "lock"}

    def job_names(self) -> list[str]:
        """Return the names of the jobs with files in this directory."""
        try:
            return sorted(path.name for path in (self.path / "jobs").iterdir() if path.is_dir())
        except FileNotFoundError:
            return []

    def check_known(self, store: Path | str, last_event: int) -> None:
        """Raise `StateDirError` for a store without events if jobs have files here.

        The database was replaced: new jobs would use the files of old jobs with the same names.
        """
        jobs = [] if last_event else self.job_names()
        if jobs:
            names = ", ".join(jobs[:3]) + (", …" if len(jobs) > 3 else "")
            files = f"the files of {count(len(jobs), 'job')} ({names})"
            raise StateDirError(
                f"the store {Location.of(store)} is empty, but {self.path / 'jobs'} holds "
                f"{files}; bring its database back, or move that folder away to start again"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory: at most one scheduler serves it; raise `StateDirError` otherwise."""
        with open_private(self.path / "lock") as file:
            if not _lock(file.fileno()):
                info = self.read_server()
                who = f" (process {info.pid}, {info.url})" if info else ""
                raise StateDirError(
                    f"another scheduler already serves {self.path}{who}; "
                    "stop it first, or choose another --state-dir"
                )
            yield

    def is_served(self) -> bool:
        """Return whether a scheduler serves the directory now."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def keep_store(self, where: Path | str) -> None:
        """Record the location of the store for commands and later schedulers, in a private file."""
        new = Location.of(where)
        if self.has_store():
            old = Location.of(self.store)
            if old.url.set(password=None) != new.url.set(password=None):
                _LOG.warning("the store was %s; its jobs are not in %s", old, new)
        write_aside(self.store_url, f"{new.secret()}\n".encode(), PRIVATE)

    @property
    def admin_token_file(self) -> Path:
        """The file of the admin token."""
        return self.path / "admin.token"

    def identity(self, cluster: str) -> str:
        """Return a random name for what is made in a kind of cluster; it lasts as long as the jobs.

        Raises:
            StateDirError: its file cannot be used.
        """
        path = self.path / f"{cluster}.id"
        try:
            if not path.exists():
                write_aside(path, f"{secrets.token_hex(8)}\n".encode(), PRIVATE)
            kept = path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise StateDirError(f"{path} cannot be read or written: {error}") from error
        if not _IDENTITY.fullmatch(kept):
            raise StateDirError(
                f"{path} contains {kept[:40]!r}, not a name of letters and digits; restore it, or "
                "remove it once nothing of this scheduler runs in the cluster"
            )
        return kept

    def admin_token(self) -> str:
        """Return the admin token; to replace it, remove its file and restart the scheduler."""
        path = self.admin_token_file
        try:
            if make_private(path, "remove it to have another"):
                _LOG.warning("others could read %s, which opens everything; remove it", path)
            token = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            token = ""
        except (OSError, ValueError) as error:
            raise StateDirError(
                f"{path} cannot be read ({error}); it contains the admin token; "
                "remove it to have another"
            ) from error
        if len(token) < TOKEN_LENGTH:
            token = secrets.token_urlsafe(TOKEN_LENGTH)
            write_aside(path, f"{token}\n".encode(), PRIVATE)
        return token

    def write_server(self, info: ServerInfo) -> None:
        """Record the address of the scheduler, in a private file."""
        write_aside(self.server, (json.dumps(asdict(info), indent=2) + "\n").encode(), PRIVATE)

    def read_server(self) -> ServerInfo | None:
        """Return the recorded address of the scheduler; None if there is none."""
        try:
            content = json.loads(self.server.read_text(encoding="utf-8"))
            url, pid, token = content["url"], content["pid"], content["token"]
            authority = content.get("ca_file")
            return ServerInfo(
                str(url),
                int(pid),
                str(token),
                int(content.get("port", 0)),
                None if authority is None else str(authority),
                bool(content.get("everywhere")),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remove_server(self) -> None:
        """Remove the recorded address of the scheduler."""
        with suppress(FileNotFoundError):
            self.server.unlink()


def _lock(file: int) -> bool:
    """Lock a file for this process; wait for processes that only test the lock."""
    deadline = time.monotonic() + 0.5
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True
