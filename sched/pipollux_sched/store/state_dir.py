"""The directory in which a scheduler keeps everything: its store, the files of its jobs.

<state dir>/pipollux.db                     the store
<state dir>/store.url                       where the store is, if elsewhere (mode 0600)
<state dir>/lock                            held by the scheduler that serves this directory
<state dir>/admin.token                     opens everything (mode 0600)
<state dir>/server.json                     where it listens, and its admin token (mode 0600)
<state dir>/jobs/NAME/checkpoints/          what the job saved
<state dir>/jobs/NAME/checkpoints-G/        the same, since generation G ran it from the start
<state dir>/jobs/NAME/generations/gen-G/    what was started last, and how its processes are
<state dir>/jobs/NAME/logs/gen-G-replica-R.log
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from platformdirs import user_state_path

from pipollux_sched.utils.atomic_write import PRIVATE, write_aside

from .errors import StateDirError
from .location import Location
from .ownership import make_private, open_private

_LOG = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "PIPOLLUX_STATE_DIR"
"""Names the state directory where no flag does."""

TOKEN_LENGTH = 32
"""Random bytes of the admin token, and the fewest characters that one has."""
_LOG_NAME = re.compile(r"gen-(\d+)-replica-(\d+)\.log")


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
        """Take `path`, else what PIPOLLUX_STATE_DIR says, else the user's folder for states.

        That is `pipollux` in what XDG_STATE_HOME says, else in ~/.local/state.
        """
        named = path or os.environ.get(ENVIRONMENT_VARIABLE)
        return cls(Path(named) if named else user_state_path("pipollux", appauthor=False))

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
        """Return whether a scheduler has kept a store for this directory."""
        return self.store_url.exists() or self.database.exists()

    @property
    def server(self) -> Path:
        """The file that says where the scheduler listens."""
        return self.path / "server.json"

    def job(self, name: str) -> Path:
        """Return the directory of a job."""
        return self.path / "jobs" / name

    def checkpoints(self, name: str, first_generation: int = 1) -> Path:
        """Return the directory of a job's checkpoints, of the run that began with a generation."""
        number = "" if first_generation == 1 else f"-{first_generation}"
        return self.job(name) / f"checkpoints{number}"

    def generation(self, name: str, generation: int) -> Path:
        """Return the directory of what is known of a generation and its processes."""
        return self.job(name) / "generations" / f"gen-{generation}"

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
        """Make the directory, for its owner alone; one that is there is tightened where need be.

        Raises:
            StateDirError: it cannot be made or written to, is somebody else's, or is open to others
                and holds something else, so that closing it might shut them out.
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
        """Return whether there is something, but nothing that a scheduler has left."""
        names = {path.name for path in self.path.iterdir()}
        return bool(names) and not names & {self.database.name, self.store_url.name, "lock"}

    def job_names(self) -> list[str]:
        """Return the names of the jobs that have left files here."""
        try:
            return sorted(path.name for path in (self.path / "jobs").iterdir() if path.is_dir())
        except FileNotFoundError:
            return []

    def check_known(self, store: Path | str, last_event: int) -> None:
        """Refuse a store in which nothing has ever happened, though jobs have left files here.

        Its database was lost, or is another one: it would be filled again, and files of these jobs
        be mixed with those of new ones of their names.

        Args:
            store: where the store is.
            last_event: id of the last event in it.

        Raises:
            StateDirError: it is such a store.
        """
        jobs = [] if last_event else self.job_names()
        if jobs:
            names = ", ".join(jobs[:3]) + (", …" if len(jobs) > 3 else "")
            raise StateDirError(
                f"the store {Location.of(store)} is empty, but {self.path / 'jobs'} holds the "
                f"files of {len(jobs)} jobs ({names}); bring its database back, or move that "
                "folder away to start again"
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory: at most one scheduler serves it at a time.

        Raises:
            StateDirError: another one does, or the lock is somebody else's.
        """
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
        """Record where the store is, for commands and later schedulers; for the owner alone."""
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
            if make_private(path, "remove it to have another"):
                _LOG.warning("others could read %s, which opens everything; remove it", path)
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
        """Record where the scheduler listens; readable for the owner alone."""
        write_aside(self.server, (json.dumps(asdict(info), indent=2) + "\n").encode(), PRIVATE)

    def read_server(self) -> ServerInfo | None:
        """Read where the scheduler listens; None when none says so."""
        try:
            content = json.loads(self.server.read_text(encoding="utf-8"))
            return ServerInfo(str(content["url"]), int(content["pid"]), str(content["token"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remove_server(self) -> None:
        """Record that no scheduler listens any more."""
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
