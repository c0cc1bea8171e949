"""torchrun's agent of one replica, the same on every engine.

    python -P agent.py OPTIONS -- SCRIPT ARGS...
    python -P agent.py OPTIONS -- -m MODULE ARGS...
    python -P agent.py OPTIONS -- -c COMMAND ARGS...

Run as a file or as a module, in a process of the job. It is ``torchrun`` with three additions:

* a rendezvous backend (``--rdzv-backend=pipollux``) at ``--rdzv-endpoint`` or, without one, at the
  address of replica 0 from the scheduler (:mod:`~pipollux_agent.address_exchange`);
* a repeated SIGTERM has no effect, as the sender may repeat it until it arrives;
* at its end it writes an `AgentResult` to the file PIPOLLUX_RESULT_FILE, and exits with the status
  of the script: 143 after an agreed stop.

torch's own store listens on every interface of the machine, whatever address it is given, without
authentication. The store here only listens on the address of the rendezvous.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from pydantic import ValidationError

from pipollux_protocol import environment as variables
from pipollux_protocol.exit_statuses import DAEMONISED, STOPPED
from pipollux_protocol.files import STOP_MARKER, UNSENT_REPORT, AgentResult, ResultError, StopMarker

LINGER = 2.0
"""Seconds for processes that the script has forked to end."""
_DAEMONISED = (
    "The script ended with exit status 0, but a process that it had forked still ran (PID {}), and "
    "was ended: a job ends with its script. Train in the process that is started, not in a daemon."
)
_asked = False


def main() -> int:
    """Run the agent; return its exit status."""
    _ignore_repeated_signals()
    _make_folder()
    script = sys.argv.index("--") + 1
    first = str(Path(__file__).with_name("script_main.py"))
    process = _words_of_script(first, sys.argv[script:])
    sys.argv.insert(script, first)
    with _own_folder() as folder:
        # torch's agent copies the error file of the script's process to this path.
        error_file = folder / "error.json"
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        status = _run_beside_servers()
        result = result_of(error_file, os.environ)
        left = _left_behind(process) if status == 0 else []
        if left:
            status, message = DAEMONISED, _DAEMONISED.format(", ".join(map(str, left)))
            print(message, file=sys.stderr, flush=True)
            result = result.model_copy(update={"error": ResultError(message=message)})
        _leave_result(result)
    return status


def _words_of_script(first: str, words: list[str]) -> list[str]:
    """Return the words that the command line of a process has that runs the script."""
    if words[0] == "-c":  # `script_main` becomes the shell
        return ["/bin/sh", "-c", words[1], "sh"]
    return [first, *words[: 2 if words[0] == "-m" else 1]]


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Create a folder for temporary files of the agent and torch.

    The engine removes a folder that it names; one in the system's temporary directory remains if
    the agent is killed.
    """
    named = os.environ.pop(variables.AGENT_FOLDER.name, "")
    if named:
        os.makedirs(named, mode=0o700, exist_ok=True)
        tempfile.tempdir = named
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="pipollux-agent-") as folder:
        yield Path(folder)


def _left_behind(command: list[str]) -> list[int]:
    """Return the processes, forked by the script, that still run it after its end.

    The command line of a process that runs the script has the words of `command`.
    """
    known = (variables.JOB_ID, variables.ATTEMPT, variables.REPLICA)
    # Jobs of two schedulers on one machine may have the same name.
    marks = (*(variable.name for variable in known), "PIPOLLUX_STATE_DIR", "PIPOLLUX_STEP")
    wanted = {f"{name}={os.environ[name]}".encode() for name in marks if name in os.environ}
    words = {os.fsencode(word) for word in command}
    if not wanted or not os.path.isdir("/proc/self"):
        return []
    deadline = time.monotonic() + LINGER
    while found := [pid for pid in _process_ids() if _runs(pid, words, wanted)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.1)
    return found


def _process_ids() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != own]


def _runs(pid: int, words: set[bytes], variables: set[bytes]) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if not words <= set(command):
            return False
        return variables <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # it has ended, or belongs to another user
        return False


def _run_beside_servers() -> int:
    """Run the script, and the server beside this replica as long as replicas use it."""
    if not variables.NUM_SERVERS.read(os.environ):
        return _run()
    package = _package()
    exchange = import_module(f"{package}.address_exchange")
    host = import_module(f"{package}.servers").ServerHost(exchange)
    status = 1
    try:
        host.start()
        status = _run()
    finally:
        if not _asked:  # a repeated request has no effect: other replicas may still push
            signal.signal(signal.SIGTERM, lambda *_: host.hurry())
        host.end(at_once=status not in (0, STOPPED))
    return status


def _run() -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import main as torchrun

    if "--signals-to-handle" in get_args_parser().format_help():
        sys.argv.insert(1, "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT")  # not SIGTERM, handled here
    rendezvous = import_module(f"{_package()}.rendezvous")
    rendezvous_handler_registry.register(rendezvous.BACKEND, rendezvous.create_handler)
    try:
        torchrun()
    except SignalException:
        return STOPPED
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = int(failure.exitcode)
        return code if code >= 0 else 128 - code
    except Exception as error:  # re-raised unless a stop caused it
        # If a stop arrives before torch's timer of a call has started, torch fails at the end of
        # that call and hides the stop, but it has ended the script as for a stop.
        if isinstance(error.__context__, SignalException):
            return STOPPED
        raise
    return 0


def _package() -> str:
    """Return a package for the modules beside this file; importing the real one is slow."""
    if __package__:
        return __package__
    package = ModuleType("pipollux_agent")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules[package.__name__] = package
    return package.__name__


def _make_folder() -> None:
    """Create the directory of checkpoints, as a scheduler without access to the disk cannot.

    If this fails, the script reports it when it saves.
    """
    folder = os.environ.get(variables.CHECKPOINT_DIR.name)
    if folder:
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)


def _ignore_repeated_signals() -> None:
    """Raise torch's SignalException at the first SIGTERM, and ignore further ones."""

    def stop(number: int, _frame: FrameType | None) -> None:
        global _asked
        signal.signal(number, signal.SIG_IGN)
        _asked = True
        loaded = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
        if loaded is None or not hasattr(loaded, "SignalException"):
            sys.exit(STOPPED)  # nothing has been started yet
        sigval = signal.Signals(number)
        raise loaded.SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)

    signal.signal(signal.SIGTERM, stop)


def result_of(error_file: Path, environment: Mapping[str, str]) -> AgentResult:
    """Return how the script ended."""
    error = None
    found = _read(error_file)
    if found is not None:
        with suppress(KeyError, TypeError, ValidationError):
            fields = {"message": found["message"]["message"], "types": tuple(found["types"])}
            error = ResultError(**fields, loaded=found["loaded"])
    checkpoints = variables.CHECKPOINT_DIR.read(environment) or Path("/nowhere")
    if environment.get(variables.SERVERS.name):  # each replica has its own
        checkpoints /= f"replica-{variables.REPLICA.read(environment) or 0}"
    attempt = environment.get(variables.ATTEMPT.name)
    step = None
    with suppress(OSError, ValueError):
        stopped = StopMarker.model_validate_json((checkpoints / STOP_MARKER).read_bytes())
        step = stopped.step if str(stopped.attempt) == attempt else None
    report = _read(checkpoints / UNSENT_REPORT)
    # The last rank 0 has written it; the scheduler accepts the first one that it receives.
    ours = report is not None and str(report.get("attempt")) == attempt
    return AgentResult(asked=_asked, error=error, step=step, report=report if ours else None)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _leave_result(result: AgentResult) -> None:
    path = variables.RESULT_FILE.read(os.environ)
    if path is None:
        return
    limit = variables.RESULT_LIMIT.read(os.environ) or 2**23
    report = dict(result.report or {})
    points = list(report.get("points", []))
    text = result.model_dump_json()
    while len(text.encode()) > limit and points:  # the last points are the most useful
        del points[: max(len(points) // 2, 1)]
        shorter = {**report, "points": points, "timeline": None}
        text = result.model_copy(update={"report": shorter}).model_dump_json()
    if len(text.encode()) > limit:
        error = result.error
        if error is not None:
            error = error.model_copy(update={"message": error.message[-limit // 4 :]})
        text = result.model_copy(update={"report": None, "error": error}).model_dump_json()
    with suppress(OSError):  # the scheduler then only has the exit status
        _write(path, text)


def _write(path: Path, text: str) -> None:
    """Replace a file atomically; a mounted file is overwritten in place."""
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
