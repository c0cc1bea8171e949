"""Programs in processes of their own: started as a user does, or forked where imports are paid.

`Forked(script)` stands for `Command([sys.executable, script])`: a process of its own, with its own
environment, folder, input, output and exit status, that takes signals and runs as `__main__`. It is
forked from a server that has imported torch, Pipollux and what they need, which saves the seconds
that this takes. `run_pipollux` so runs the command line. That a Python of its own does as well is
left to a few tests that start one.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

PRELOADED = [
    *("torch._dynamo", "torchgpipe", "scipy.optimize", "scipy.interpolate", "pipollux_hybrid"),
    # What the packages import when it is needed.
    *(
        "pipollux_hybrid.pipeline.process_engine",
        "pipollux_hybrid.push_pull.server_main",
        "pipollux_hybrid.telemetry.reporter",
        "pipollux_perfmodel.fitting.fit",
        "pipollux_perfmodel.hints.hints",
        "pipollux_policies.pollux.nsga2",
    ),
    *("pipollux_sched.cli.serve", "pipollux_sched.cli.plan", "pipollux_simulator"),
    *("pipollux_perfmodel.modeling", "autograd.numpy", "httpcore", "textual.app", "rich.markdown"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
    # What modules of tests import, from which replicas take the function that they run.
    *("pytest", "hypothesis.internal.conjecture.providers", "allpairspy"),
]
PIPOLLUX = Path(sys.executable).with_name("pipollux")
WRITTEN = os.O_WRONLY | os.O_APPEND
LIMIT = 240.0
"""Seconds that a program may take: machines that run tests are busy."""
_PORTS = range(10_000, 20_000)
"""Below those of the local backend, too."""
_PORTS_OF_PROCESS = 500
_ports = itertools.count(os.getpid())
_hosts = itertools.count()


def fork_server() -> ForkServerContext:
    """Return what starts processes that have imported torch; all share one server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on just now, and that no test beside this one gets.

    It lies below those that the kernel gives to outgoing connections, which may take any of these
    before the port is listened on.
    """
    first, _ = _reserve_ports()
    for _ in range(_PORTS_OF_PROCESS):
        port = first + next(_ports) % _PORTS_OF_PROCESS
        with socket.socket() as probe, suppress(OSError):  # a port that is taken
            probe.bind((address, port))
            return port
    raise OSError(f"{address}: no port from {first} on is free")


@functools.cache
def _reserve_ports() -> tuple[int, socket.socket]:
    """Reserve ports for this process among all that run tests on this machine.

    Returns:
        The first port, and what reserves them until this process ends: a Unix socket whose name
        nobody else can bind, in the kernel's namespace of such names.
    """
    for first in reversed(_PORTS[::_PORTS_OF_PROCESS]):
        reservation = socket.socket(socket.AF_UNIX)
        with suppress(OSError):  # another process has these
            reservation.bind(f"\0pipollux-tests-{first}")
            atexit.register(reservation.close)
            return first, reservation
        reservation.close()
    raise OSError(
        f"all ports from {_PORTS.start} to {_PORTS.stop - 1} are reserved for other tests"
    )


class Started:
    """A program that was started; a context manager that kills what still runs of it.

    Attributes:
        pid: its process.
        output: what it has printed so far.
        errors: what it has written to its standard error so far.
    """

    pid: int

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdin", "stdout", "stderr")]
        for path in self._files:
            path.touch()

    @property
    def output(self) -> str:
        return self._files[1].read_text()

    @property
    def errors(self) -> str:
        return self._files[2].read_text()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        raise NotImplementedError

    def wait(self, seconds: float = LIMIT) -> int:
        """Return the exit status when it has ended."""
        self._join(seconds)
        code = self.poll()
        assert code is not None, f"it runs on after {seconds:.0f} s: {self.output}{self.errors}"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _join(self, seconds: float) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()
        self._folder.cleanup()


class Command(Started):
    """A command, started as a user does.

    Args:
        command: the program and its arguments.
        environment: the whole of it; None: this process's.
        folder: where it runs; None: here.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        with ExitStack() as files:
            output, errors = (files.enter_context(path.open("ab")) for path in self._files[1:])
            self._process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=output, stderr=errors
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def _join(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


class Forked(Started):
    """A Python script, forked from a process that has imported torch.

    Args:
        script: file to run.
        args: its arguments.
        environment: the whole of it; None: this process's.
        folder: where it runs; None: here.
        stdin: what it can read.
    """

    def __init__(
        self,
        script: Path,
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: str = "",
    ) -> None:
        super().__init__()
        self._files[0].write_text(stdin)
        argv = [str(script), *args]
        env = dict(os.environ if environment is None else environment)
        told = (argv, env, str(folder or Path.cwd()), [str(path) for path in self._files])
        self._process: Any = fork_server().Process(target=_become, args=told)
        self._process.start()
        self.pid = int(self._process.pid)

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def _join(self, seconds: float) -> None:
        self._process.join(seconds)


class Replicas:
    """A script as the replicas of a job, forked, and told their ranks as torchrun would.

    Args:
        script: file to run.
        num_replicas: how many of it.
        args: arguments of each.
        environment: the rest of it; None: this process's.
        folder: where they run; None: here.
    """

    def __init__(
        self,
        script: Path,
        num_replicas: int,
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        port = free_port()
        known = os.environ if environment is None else environment
        self.programs: list[Forked] = []
        with ExitStack() as started:
            for rank in range(num_replicas):
                told = {**known, **ranks(rank, num_replicas, port)}
                self.programs.append(started.enter_context(Forked(script, args, told, folder)))
            self._started = started.pop_all()

    @property
    def errors(self) -> str:
        """What all have written to their standard error so far, replica by replica."""
        return "".join(program.errors for program in self.programs)

    @property
    def output(self) -> str:
        """What all have printed so far, replica by replica."""
        return "".join(program.output for program in self.programs)

    def poll(self) -> int | None:
        """Return a status that is not 0, or 0 where all ended well; None while they run."""
        codes = [program.poll() for program in self.programs]
        return next(filter(None, codes), None if None in codes else 0)

    def wait(self, seconds: float = LIMIT) -> int:
        """Return 0 when all have ended well, else a status that is not."""
        return next(filter(None, [program.wait(seconds) for program in self.programs]), 0)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to each, as torchrun does when it is sent one."""
        for program in self.programs:
            program.send_signal(number)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()


def own_host() -> str:
    """Return another host's name for each process, or NCCL would refuse those that share a GPU."""
    return f"process-{next(_hosts)}"


def ranks(rank: int, num_replicas: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a replica of its place."""
    told = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_replicas),
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": "1",
        "NCCL_HOSTID": own_host(),
    }
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**told, **meeting} if num_replicas > 1 else told


def run_pipollux(
    *args: str | Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: str = "",
    program: Path = PIPOLLUX,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, where a warning is an error."""
    words = [str(arg) for arg in args]
    with Forked(program, words, environment, folder, stdin) as started:
        code = started.wait()
        return subprocess.CompletedProcess(words, code, started.output, started.errors)


def _become(argv: list[str], environment: dict[str, str], folder: str, files: list[str]) -> None:
    """Go on as `python SCRIPT ARGS`."""
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # of what was imported before: torch's take 40 ms
    for number, (path, mode) in enumerate(zip(files, (os.O_RDONLY, *[WRITTEN] * 2), strict=True)):
        file = os.open(path, mode)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the process's own
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)  # not the parent's
    if argv[0] == str(PIPOLLUX):
        warnings.simplefilter("error")
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except Exception as error:  # as the interpreter ends a script
        sys.last_value = error
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which a forked process leaves out
