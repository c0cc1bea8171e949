"""The choice of a command's scheduler, by `--server` and the environment."""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipollux_protocol.environment import TOKEN

from .console import USAGE, CommandError, warn

if TYPE_CHECKING:
    from pipollux_sched.client.client import Client

TOKEN_VARIABLE = TOKEN.name
TOKEN_FILE_VARIABLE = f"{TOKEN_VARIABLE}_FILE"


class ServerChoice(NamedTuple):
    """A scheduler given by its URL."""

    url: str
    token_file: Path | None
    by_flag: bool
    """Whether the URL is from the command line, not the environment."""
    timeout: float | None
    ca_file: Path | None = None
    """Certificates of the authorities to trust; None: those of the system."""

    def client(self) -> Client:
        """Return a client of the scheduler; raise `CommandError` if anything is invalid."""
        from pipollux_sched.client.client import Client
        from pipollux_sched.client.connection import TIMEOUT, ClientError, checked_url, is_loopback

        try:
            url = checked_url(self.url)  # before a message shows it
            token, timeout = self._token(url), self.timeout or TIMEOUT
            client = Client.at(url, token, timeout=timeout, ca_file=self.ca_file)
        except ClientError as error:
            raise CommandError(str(error), USAGE) from error
        if url.startswith("http://") and not is_loopback(url):
            _warn_once(f"the token is sent unencrypted to {url}; use https, or a tunnel")
        return client

    def _token(self, url: str) -> str:
        if self.token_file is None:
            token = os.environ.get(TOKEN_VARIABLE, "").strip()
            if not token:
                raise CommandError(
                    f"{url} needs a token: the admin's, in admin.token in the scheduler's "
                    "state directory, or a user's; give it in a file with "
                    f"--token-file, or in {TOKEN_VARIABLE}",
                    USAGE,
                )
            return token
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise CommandError(
                f"--token-file: {self.token_file} cannot be read ({reason}); give a file that "
                "holds the token",
                USAGE,
            ) from None


_WARNED: ContextVar[bool] = ContextVar("warned", default=False)
_CHOSEN: ContextVar[ServerChoice | None] = ContextVar("server", default=None)


def chosen_server() -> ServerChoice | None:
    """Return the scheduler of the running command; None: the one of its state directory."""
    return _CHOSEN.get()


def choose_server(context: Any, timeout: float | None = None) -> None:
    """Determine a command's scheduler from its command line and the environment.

    The command line overrides the environment, and a URL overrides a state directory. `timeout` is
    in seconds; None: the default.

    Raises:
        CommandError: `--server` and `--state-dir` were both given, or the command is local.
    """
    root = context.find_root()
    url, token_file, ca_file = (
        root.params.get(name) for name in ("server", "token_file", "ca_file")
    )
    _WARNED.set(False)
    by_flag = _by_flag(root, "server")
    by_directory = _by_flag(context, "state_dir")
    name = context.info_name
    if by_flag and ("state_dir" not in context.params or name == "serve"):
        raise CommandError(
            f"--server: 'pipollux {name}' works on this machine alone; leave it out", USAGE
        )
    if by_flag and by_directory:
        raise CommandError(
            "--server names a scheduler by its URL, --state-dir one of this machine; "
            "give one of them",
            USAGE,
        )
    if not url or by_directory:
        found = None
    else:
        token_path, ca_path = (None if f is None else Path(f) for f in (token_file, ca_file))
        found = ServerChoice(url, token_path, by_flag, timeout, ca_path)
    _CHOSEN.set(found)


def check_unused_token(context: Any) -> None:
    """Refuse `--token-file` if a command uses the scheduler of a state directory; else warn.

    Raises:
        CommandError: `--token-file` was given on the command line.
    """
    local = chosen_server() is None and context.info_name != "serve"
    if not local or "state_dir" not in context.params:
        return
    because = (
        "whoever may read a state directory is the admin of its scheduler; to be the user that "
        "the token is of, name the scheduler with --server"
    )
    root = context.find_root()
    if _by_flag(root, "token_file"):
        raise CommandError(f"--token-file is not used: {because}", USAGE)
    unused = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else None
    if root.params.get("token_file"):
        unused = TOKEN_FILE_VARIABLE
    if unused is not None:
        _warn_once(f"{unused} is not used: {because}")


def _warn_once(sentence: str) -> None:
    """Print a warning once per command, for any number of clients."""
    if not _WARNED.get():
        _WARNED.set(True)
        warn(sentence)


def refuse_server(what: str) -> None:
    """Refuse `--server` for local commands ("apply with files"); the environment is ignored."""
    server = _CHOSEN.get()
    if server is not None and server.by_flag:
        raise CommandError(f"--server: {what} works on this machine alone; leave it out", USAGE)


def _by_flag(context: Any, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
