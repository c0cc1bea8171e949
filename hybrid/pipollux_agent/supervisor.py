"""Runs one command for a scheduler that may end before it, and records how it ended.

    python -I -S supervisor.py STATUS LOG LIMIT COMMAND...         the parent of an agent
    python -I -S supervisor.py --step BASE LOG LIMIT COMMAND...    the same on a node of a cluster

With `--memory=BYTES` before these, it ends COMMAND with all its processes when they use more; with
`--memory=BYTES:GROUP` COMMAND starts in the control group GROUP, where the kernel limits it. With
`--guard=PID` before all, another process stands between it and its parent PID: see `guard`.

Only the parent of a process receives its exit status. To keep it when a scheduler is killed, each
agent has this small parent, which forwards a stop signal to COMMAND, once, and writes to STATUS
whether it was asked to stop and the exit status of COMMAND. STATUS is written at the start, with
space reserved for that on a full disk. The output of COMMAND goes to LOG (renamed to LOG.from-START
when it reaches LIMIT bytes).

In a step of Slurm, or below an actor of Ray, STATUS is BASE.exit, and LOG is written on the node;
all nodes share both folders. So neither depends on srun, which exits with status 0 when a node
fails, and is lost with its own machine. A request is the content of the file BASE.signal: "stop"
sends SIGTERM to COMMAND alone; "kill", and "gone" (another step replaces this one), kill all
processes of the step, also orphans that Slurm may not find. The file is polled, which also works on
a node whose slurmd is dead, and read at each SIGCONT. If Slurm tracks processes by their parents or
groups, a signal to a step reaches all of them: SIGTERM would end the workers of a data loader whose
script is about to save, while SIGCONT has no effect on a process that runs. SIGTERM, which Slurm
sends before the end of an allocation, is a stop.

The module is run as a file, without its package, which costs a few milliseconds and megabytes; it
must import only the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

MEMORY_INTERVAL = 0.5
"""Seconds between two checks of the memory."""
CHARGE = 2**20
"""Bytes by which a full control group may be below its limit, more than the kernel adds at once."""
PIPE_SIZE = 2**16
"""Bytes that a pipe holds, by default."""
LAST_WORDS = 1.0
"""Seconds for which output of COMMAND is still written after it has ended."""
LINGER = 1.0
"""Seconds for remaining processes of a step to end before they are killed."""
POLL_INTERVAL = 2.0
"""Polling interval of BASE.signal in seconds."""
WRITE_PATIENCE = 60.0
"""Seconds for which writing the exit status is retried."""
FULL_PATIENCE = 600.0
"""Seconds for which writing STATUS is retried while the disk is full."""
STATUS_SIZE = 256
"""Size of a status in bytes, padded with spaces, so that a later one fits in its place."""
RENAMED = ".from-"
"""Infix of the names of renamed parts of a log; see `store.log_files`."""
NO_STATUS = 74
"""Exit status if STATUS cannot be written, so that COMMAND was not started."""
SYNC_INTERVAL = 0.05
"""Seconds for which a step collects output before it writes it to the shared folder."""
STOPPED = 128 + signal.SIGTERM
"""Exit status of a step that was stopped before it began."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`."""
MARK = "PIPOLLUX_STEP"
"""Environment variable that identifies the processes of a step; its value is BASE."""


def birth(pid: int) -> str | None:
    """Return an identity of a process that is unique despite reused ids; None: no such process.

    It consists of the boot id and the clock ticks from the boot to the process's start: unlike the
    wall-clock start time, they do not change when the clock is set.
    """
    try:
        # Thousands of processes are checked every second, and a Path costs more than the read.
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
        boot = _boot()
    except OSError:
        return None
    # The fields follow the name, which may contain any character; a zombie has ended.
    fields = stat.rpartition(b")")[2].split(maxsplit=20)
    return None if fields[0] in (b"Z", b"X") else f"{boot}:{fields[19].decode()}"


@lru_cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def start_recorded(base: Path, log: Path, shown: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """Start the supervisor of a step from its record BASE.json, with a `guard` below this process.

    `shown` are the variables of its devices. None: it cannot be started, and LOG says why.
    FileExistsError: it was started before.
    """
    record = json.loads(base.with_name(f"{base.name}.json").read_text(encoding="utf-8"))
    with open(base.with_name(f"{base.name}.begun"), "xb", opener=private):
        pass
    python, isolated, bare, module, *words = record["command"]
    with open(log, "ab", opener=private) as output:
        try:
            return subprocess.Popen(
                [python, isolated, bare, module, f"--guard={os.getpid()}", *words],
                env=record["environment"] | shown,
                cwd=record["directory"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            output.write(f"{os.uname().nodename}: {error}\n".encode())
    return None


def guard(parent: int) -> None:
    """Continue in a child, which gets SIGTERM when this process is killed; wait for it here.

    This process ends with its own `parent`. What kills all children of an actor of Ray, even at
    once, so stops COMMAND, which can still save.
    """
    _end_with(parent, signal.SIGKILL)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        _end_with(own, signal.SIGTERM)
        return
    signal.signal(signal.SIGCONT, lambda *_: os.kill(child, signal.SIGCONT))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _end_with(parent: int, number: signal.Signals) -> None:
    """Let the kernel send a signal to this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(NO_STATUS)


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Write a status to a temporary file, and rename it."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with open(aside, "w", encoding="utf-8", opener=private) as file:
            file.write(json.dumps(status).ljust(STATUS_SIZE))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def overwrite_status(path: Path, status: dict[str, Any]) -> None:
    """Overwrite the previous status in place, which needs no space on a full disk."""
    text = json.dumps(status).ljust(STATUS_SIZE)
    with path.open("r+b", buffering=0) as file:
        file.write(text.encode())
        os.fsync(file.fileno())


def private(path: str, flags: int) -> int:
    """Open a file with mode 0600; an opener for `open`."""
    return os.open(path, flags, 0o600)


def say(text: str) -> None:
    """Print a line; errors of the disk or the reader are ignored."""
    with suppress(OSError):
        os.write(1, f"{text}\n".encode())


class MemoryWatch:
    """Kills the processes below this one when they use more memory than a limit.

    The memory is the sum of their proportional set sizes, so that pages that several processes
    share count once. This needs no rights, and no support of the kernel's control groups; it is
    checked periodically, so that a quick process may exceed the limit for a moment.
    """

    enter: Callable[[], None] | None = None
    """Called in the process that becomes COMMAND."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used: int | None = None
        """What was used when the processes were killed; None: they were not."""
        self._sessions: set[int] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start to check."""
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the entries of a status."""
        return {} if self.used is None else {"memory": [self.limit, self.used]}

    def end(self, code: int) -> int:
        """Return the exit status to record for a COMMAND that has ended with `code`."""
        return code

    def _run(self) -> None:
        while True:
            time.sleep(MEMORY_INTERVAL)
            self._check()

    def _check(self) -> None:
        found = self.processes()
        if sum(map(_resident, found)) <= self.limit:  # an upper bound, and quickly read
            return
        used = sum(map(_proportional, found))
        if used > self.limit:
            self.used = used
            _kill(found)

    def processes(self) -> list[int]:
        """Return the processes below this one, and those in a session that one of them had."""
        own, parents, sessions = os.getpid(), {}, {}
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with suppress(OSError):
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        fields = file.read().rpartition(b")")[2].split(maxsplit=5)
                    parents[int(entry)], sessions[int(entry)] = int(fields[1]), int(fields[3])
        below = {own}
        more = True
        while more:
            more = False
            for pid, parent in parents.items():
                if pid not in below and (parent in below or sessions[pid] in self._sessions):
                    below.add(pid)
                    more = True
        below.discard(own)
        shared = set() if os.getsid(0) == own else {os.getsid(0)}
        self._sessions |= {sessions[pid] for pid in below} - shared
        return sorted(below)


class MemoryGroup(MemoryWatch):
    """Processes in a control group, whose memory the kernel limits to `limit`.

    The kernel kills one of them, or all. This kills the others, so that the end is that of a
    `MemoryWatch`. The group was made for COMMAND alone, by either version of control groups.
    """

    def __init__(self, limit: int, group: Path) -> None:
        super().__init__(limit)
        self._group = group
        self.enter = self._enter

    def end(self, code: int) -> int:
        """Return the exit status to record; an agent may see the kill before it is killed, too."""
        if code == 0:
            return 0
        self._check()
        return code if self.used is None else -signal.SIGKILL

    def processes(self) -> list[int]:
        """Return the processes of the group."""
        try:
            return list(map(int, self._read("cgroup.procs").split()))
        except OSError:
            return []

    def _enter(self) -> None:
        try:
            (self._group / "cgroup.procs").write_text("0")
        except OSError as error:
            say(f"{self._group} cannot be entered: {error.strerror}")
            os._exit(NO_STATUS)

    def _check(self) -> None:
        # A kill counts whatever ran out of memory, maybe a group around this one, or the machine.
        # Version 2 says which; in version 1, this group has been at its limit.
        peak = self._count("max_usage_in_bytes")
        full = self._count("oom") or peak >= self.limit - CHARGE
        if not (self._count("oom_kill") and full):
            return
        self.used = peak or self._count("peak") or self.limit
        _kill(self.processes())

    def _count(self, name: str) -> int:
        """Return a number from the files of the group; 0: this version has none."""
        with suppress(OSError, ValueError):
            if not name.startswith("oom"):
                return int(self._read(f"memory.{name}"))
            second = (self._group / "memory.events").exists()
            words = self._read("memory.events" if second else "memory.oom_control").split()
            return int(words[words.index(name) + 1])
        return 0

    def _read(self, name: str) -> str:
        return (self._group / name).read_text(encoding="ascii")


def _kill(processes: list[int]) -> None:
    for pid in processes:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _resident(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _proportional(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)  # it has ended, or the kernel does not tell


class RotatingLog:
    """A log that is renamed to `LOG.from-START` when it reaches a size limit, and started again.

    START is the number of bytes of output before the first one in the file. The last renamed file
    is kept; earlier ones are removed. Bytes that do not fit on a full disk are dropped, and a line
    in the log reports their number. The `limit` is in bytes; existing content is kept. With
    `shared`, output reaches the server of a network file system at once, so that other machines
    see it, and a full disk is noticed.
    """

    def __init__(self, path: Path, limit: int, *, shared: bool = False) -> None:
        self._path = path
        self._limit = limit
        self._flags = os.O_DSYNC if shared else 0
        self._pause = SYNC_INTERVAL if shared else 0.0
        self._file = self._open(path)
        self._start = max((start + size for start, size in self._renamed()), default=0)
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Append output; bytes that do not fit on a full disk are dropped."""
        with suppress(OSError):
            if self._size() >= self._limit:
                # A new file begins at a line break, if there is one.
                ended = data.find(b"\n") + 1
                if ended and not self._ends_line():
                    self._append(data[:ended])
                    data = data[ended:]
                self._rotate()
        self._append(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def copy_from(self, source: int) -> None:
        """Append the content of a pipe until its last writer has closed it."""
        while data := os.read(source, PIPE_SIZE):
            self.write(data)
            if len(data) < PIPE_SIZE // 2:
                time.sleep(self._pause)

    def _open(self, path: Path) -> FileIO:
        def opener(name: str, flags: int) -> int:
            return private(name, flags | self._flags)

        return open(path, "ab", buffering=0, opener=opener)

    def _append(self, data: bytes) -> None:
        if self._dropped and data:
            lost = f"{self._dropped} bytes of output are missing here, as the disk was full"
            if not self._put(f"\n[pipollux: {lost}]\n".encode(), whole=True):
                self._dropped += len(data)
                return
            self._dropped = 0
        self._put(data)

    def _put(self, data: bytes, *, whole: bool = False) -> bool:
        """Append data; return whether all of it was written, and count dropped bytes.

        `whole`: write and count nothing unless all of it fits.
        """
        begin, done = self._size(), 0
        with suppress(OSError):
            while done < len(data):
                done += self._file.write(data[done:])
        if done == len(data):
            return True
        if whole:
            with suppress(OSError):
                self._file.truncate(begin)
        else:
            self._dropped += len(data) - done
        return False

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _ends_line(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _rotate(self) -> None:
        """Rename the file; if no new one can be created, continue with this one."""
        aside = self._path.with_name(f".{self._path.name}.part")
        new = self._open(aside)
        before = [start for start, _ in self._renamed()]
        size = self._size()
        self._path.replace(self._named(self._start))
        aside.replace(self._path)
        self._file.close()
        self._file = new
        self._start += size
        for start in before:
            self._named(start).unlink(missing_ok=True)

    def _named(self, start: int) -> Path:
        return self._path.with_name(f"{self._path.name}{RENAMED}{start}")

    def _renamed(self) -> list[tuple[int, int]]:
        """Return the start offsets and sizes of the renamed files."""
        found = self._path.parent.glob(f"{self._path.name}{RENAMED}*")
        return [(int(path.name.rpartition("-")[2]), path.stat().st_size) for path in found]


class Command:
    """The command, which gets SIGTERM once, at the first of the `signals` that stop it.

    Whoever sends a stop signal may repeat it, and a second SIGTERM makes a script exit at once.
    """

    def __init__(self, *signals: int) -> None:
        self.asked = False
        """Whether it was asked to stop, maybe before it was started."""
        self._terminated = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in signals:
            signal.signal(number, lambda *_: self.stop())

    def stop(self) -> None:
        """Ask it to stop."""
        self.asked = True
        if self._process is not None:
            # Another signal may interrupt this handler, but only at a call.
            before, self._terminated = self._terminated, True
            if not before:
                self._process.terminate()

    def start(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start it."""
        process = self._process = subprocess.Popen(words, **options)
        if self.asked:
            self.stop()
        return process

    def start_logged(
        self, words: list[str], log: RotatingLog, **options: Any
    ) -> tuple[subprocess.Popen[bytes], threading.Thread]:
        """Start it, and a thread that copies its output to a log until the last writer ends."""
        printed, printing = os.pipe()
        process = self.start(words, stdout=printing, stderr=printing, **options)
        os.close(printing)
        copying = threading.Thread(target=log.copy_from, args=(printed,), daemon=True)
        copying.start()
        return process, copying


def run(
    status: Path, log: Path, limit: int, words: list[str], memory: MemoryWatch | None = None
) -> int:
    """Run a command to its end; return the exit status of a shell."""
    command = Command(signal.SIGTERM)
    known: dict[str, Any] = {"pid": os.getpid(), "birth": birth(os.getpid())}
    error = _write_patiently(lambda: write_status(status, known), 0.0, lambda: command.asked)
    if error is not None:
        say(f"{status} cannot be written ({error}); nothing was started")
        return NO_STATUS
    enter = None if memory is None else memory.enter
    process, copying = command.start_logged(words, RotatingLog(log, limit), preexec_fn=enter)
    if memory is not None:
        memory.start()
    code = process.wait()
    code = code if memory is None else memory.end(code)
    copying.join(LAST_WORDS)  # remaining children of COMMAND may hold the pipe open
    over = {} if memory is None else memory.status()
    return record_end(status, {**known, "code": code, "asked": command.asked, **over})


def run_step(
    base: Path, log: Path, limit: int, words: list[str], memory: MemoryWatch | None = None
) -> int:
    """Run the command of a Slurm step to its end; return the exit status of a shell."""
    command = Command(signal.SIGTERM)

    def obey() -> None:
        wanted = read_signal(base)
        if wanted in ("kill", "gone"):
            kill_step(base)
        elif wanted:
            command.stop()

    signal.signal(signal.SIGCONT, lambda *_: obey())
    status = base.with_name(f"{base.name}.exit")
    for folder in (base.parent, log.parent):
        if not os.access(folder, os.W_OK):
            host = os.uname().nodename
            say(f"{host} cannot write to {folder}, which all nodes must share")
            return NO_STATUS
    if command.asked or read_signal(base):
        return record_end(status, {"code": STOPPED, "asked": True})
    with suppress(OSError):  # a full disk may have space again at the end
        write_status(status, {})
    output = RotatingLog(log, limit, shared=True)
    process, copying = command.start_logged(words, output, env={**os.environ, MARK: str(base)})
    if memory is not None:
        memory.start()
    while (code := _wait(process)) is None:
        obey()
    deadline = time.monotonic() + LINGER
    while step_processes(base) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill_step(base)
    copying.join(LAST_WORDS)
    over = {} if memory is None else memory.status()
    return record_end(status, {"code": code, "asked": command.asked, **over})


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(POLL_INTERVAL)
    return None


def record_end(path: Path, status: dict[str, Any]) -> int:
    """Write how a command ended; return its exit status as that of a shell."""
    error = _write_patiently(lambda: _write_end(path, status), WRITE_PATIENCE)
    if error is not None:
        say(f"{path} cannot be written: {error}")
    code: int = status["code"]
    return code if code >= 0 else 128 - code


def _write_end(path: Path, status: dict[str, Any]) -> None:
    try:
        write_status(path, status)
    except OSError:
        overwrite_status(path, status)


def _write_patiently(
    write: Callable[[], None], patience: float, give_up: Callable[[], bool] = lambda: False
) -> OSError | None:
    """Call a function with retries for `patience` seconds, longer on a full disk, or `give_up()`.

    Return the last error.
    """
    began = time.monotonic()
    while True:
        try:
            write()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            over = time.monotonic() >= began + (FULL_PATIENCE if full else patience)
            if over or give_up():
                return error
            time.sleep(0.5)
        else:
            return None


def read_signal(base: Path) -> str:
    """Return the content of BASE.signal: "stop", "kill", "gone", or nothing."""
    try:
        return base.with_name(base.name + ".signal").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def step_processes(base: Path) -> list[int]:
    """Return all processes of this step except this one, identified by their environment."""
    mark = f"{MARK}={base}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended, or belongs to another user
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def end_step(base: Path, patience: float) -> int:
    """Wait for the processes of a step without a supervisor, then kill them; count what remains.

    They have `patience` seconds to save, less if their signal is to kill.
    """
    deadline = time.monotonic() + patience
    while step_processes(base) and time.monotonic() < deadline:
        if read_signal(base) in ("kill", "gone"):
            break
        time.sleep(0.2)
    kill_step(base)
    return len(step_processes(base))


def kill_step(base: Path) -> None:
    """Kill all processes of this step except this one, until there are none."""
    deadline = time.monotonic() + LINGER
    while (left := step_processes(base)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    watch: MemoryWatch | None = None
    if sys.argv[1].startswith("--guard="):
        guard(int(sys.argv.pop(1).removeprefix("--guard=")))
    if sys.argv[1].startswith("--memory="):
        most, _, group = sys.argv.pop(1).removeprefix("--memory=").partition(":")
        watch = MemoryGroup(int(most), Path(group)) if group else MemoryWatch(int(most))
    in_step = sys.argv[1] == "--step"
    path, log, limit, *command = sys.argv[1 + in_step :]
    main = run_step if in_step else run
    sys.exit(main(Path(path), Path(log), int(limit), command, watch))
