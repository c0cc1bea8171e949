"""The directory in which a scheduler keeps everything: its store, the files of its jobs.

<state dir>/pipollux.db                     the store
<state dir>/store.url                       where the store is, if elsewhere (mode 0600)
<state dir>/lock                            held by the scheduler that serves this directory
<state dir>/admin.token                     opens everything (mode 0600)
<state dir>/server.json                     where it listens, and its admin token (mode 0600)
<state dir>/jobs/NAME/checkpoints/          what the job saved
<state dir>/jobs/NAME/launches/gen-G/       what was launched last, and how its processes are
<state dir>/jobs/NAME/logs/gen-G-replica-R.log
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pipollux_sched.errors import SchedulerError
from pipollux_sched.write_aside import PRIVATE, write_aside

from .location import Location

_LOG = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "PIPOLLUX_STATE_DIR"
"""Names the state directory where no flag does."""

TOKEN_LENGTH = 32
"""Random bytes of the admin token, and the fewest characters that one has."""
_LOG_NAME = re.compile(r"gen-(\d+)-replica-(\d+)\.log")


class StateDirError(SchedulerError):
    """The state directory cannot be used; the text is one sentence for the user."""


@dataclass(frozen=True)
class ServerInfo:
    """Where the scheduler of a state directory listens."""

    url: str
    pid: int
    token: str
    """The admin token."""

    @property
    def port(self) -> int:
        """The port of the URL."""
        return urlsplit(self.url).port or 80


@dataclass(frozen=True)
class StateDir:
    """The paths within a state directory.

    Example:
        >>> StateDir(Path("/var/lib/pipollux")).log("char-lm", 2, 0).name
        'gen-2-replica-0.log'
    """

    path: Path
    """Made absolute, as processes with other working directories are told about it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.expanduser().resolve())

    @classmethod
    def choose(cls, path: Path | None = None) -> StateDir:
        """Take `path`, else what PIPOLLUX_STATE_DIR says, else ~/.local/state/pipollux."""
        if path is None:
            named = os.environ.get(ENVIRONMENT_VARIABLE)
            path = Path(named) if named else Path("~/.local/state/pipollux")
        return cls(path)

    @property
    def database(self) -> Path:
        """The file of the store, where it is not elsewhere: see `store`."""
        return self.path / "pipollux.db"

    @property
    def store_url(self) -> Path:
        """The file that says where the store is, if it is elsewhere."""
        return self.path / "store.url"

    @property
    def store(self) -> Path | str:
        """What `Store` is to be opened with: a file, or the URL of a database.

        Raises:
            StateDirError: what says where it is cannot be read.
        """
        try:
            return self.store_url.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return self.database
        except (OSError, ValueError) as error:
            raise StateDirError(
                f"{self.store_url} cannot be read ({error}); it says where the store is"
            ) from error

    def has_store(self) -> bool:
        """Say whether a scheduler has kept a store for this directory."""
        return self.store_url.exists() or self.database.exists()

    @property
    def server(self) -> Path:
        """The file that says where the scheduler listens."""
        return self.path / "server.json"

    def job(self, name: str) -> Path:
        """Return the directory of a job."""
        return self.path / "jobs" / name

    def checkpoints(self, name: str) -> Path:
        """Return the directory of a job's checkpoints."""
        return self.job(name) / "checkpoints"

    def launch(self, name: str, generation: int) -> Path:
        """Return the directory of what is known of a launch and its processes."""
        return self.job(name) / "launches" / f"gen-{generation}"

    def log(self, name: str, generation: int, replica: int) -> Path:
        """Return the file that takes what one replica of one generation prints."""
        return self.job(name) / "logs" / f"gen-{generation}-replica-{replica}.log"

    def logs(self, name: str) -> list[tuple[int, int, Path]]:
        """Return the logs that are there, as (generation, replica, file) in that order."""
        found = []
        for path in (self.job(name) / "logs").glob("gen-*-replica-*.log"):
            match = _LOG_NAME.fullmatch(path.name)
            if match:
                found.append((int(match[1]), int(match[2]), path))
        return sorted(found)

    def create(self) -> None:
        """Make the directory, for its owner alone.

        Raises:
            StateDirError: it cannot be made or written to.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateDirError(
                f"{self.path} cannot be made a state directory ({error.strerror}); "
                "choose another with --state-dir"
            ) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise StateDirError(
                f"{self.path} is not writable for you; choose another with --state-dir"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory: at most one scheduler serves it at a time.

        Raises:
            StateDirError: another one does.
        """
        with (self.path / "lock").open("a") as file:
            if not _lock(file.fileno()):
                info = self.read_server()
                who = f" (process {info.pid}, {info.url})" if info else ""
                raise StateDirError(
                    f"another scheduler already serves {self.path}{who}; "
                    "stop it first, or choose another --state-dir"
                )
            yield

    def is_served(self) -> bool:
        """Say whether a scheduler serves the directory now."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def keep_store(self, where: Path | str) -> None:
        """Say where the store is, for commands and later schedulers; for the owner alone."""
        new = Location.of(where)
        if self.has_store():
            old = Location.of(self.store)
            if old.url.set(password=None) != new.url.set(password=None):
                _LOG.warning("the store was %s; jobs that are there are not in %s", old, new)
        write_aside(self.store_url, f"{new.secret()}\n".encode(), PRIVATE)

    def admin_token(self) -> str:
        """Return the token that opens everything; the same for every scheduler of the directory.

        To have another, remove the file and start the scheduler again.
        """
        path = self.path / "admin.token"
        try:
            token = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            token = ""
        except (OSError, ValueError) as error:
            raise StateDirError(
                f"{path} cannot be read ({error}); it holds the admin token, "
                "remove it to have another"
            ) from error
        if len(token) < TOKEN_LENGTH:
            token = secrets.token_urlsafe(TOKEN_LENGTH)
            write_aside(path, f"{token}\n".encode(), PRIVATE)
        return token

    def write_server(self, info: ServerInfo) -> None:
        """Say where the scheduler listens; readable for the owner alone."""
        write_aside(self.server, (json.dumps(asdict(info), indent=2) + "\n").encode(), PRIVATE)

    def read_server(self) -> ServerInfo | None:
        """Read where the scheduler listens; None when none says so."""
        try:
            content = json.loads(self.server.read_text(encoding="utf-8"))
            return ServerInfo(str(content["url"]), int(content["pid"]), str(content["token"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remove_server(self) -> None:
        """Say that no scheduler listens any more."""
        with suppress(FileNotFoundError):
            self.server.unlink()


def _lock(file: int) -> bool:
    """Lock a file for this process alone; wait for one that merely looks whether it is locked."""
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
