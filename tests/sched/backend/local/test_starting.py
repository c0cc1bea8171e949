"""How a job's processes are started: what they are given, and what they show of themselves."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from pipollux_agent import agent, rendezvous, script_main
from pipollux_sched.backend import ReplicaProgram
from pipollux_sched.backend.local.environment import loopback_interface
from pipollux_sched.backend.local.ports import free_port
from pipollux_sched.backend.replica.inherited import inherited
from pipollux_sched.backend.result import ReplicaResult, ScriptError
from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.store import StateDir
from tests.sched.backend.local.test_backend import wait_for, wait_for_text
from tests.sched.backends import cpu_nodes, local_backend
from tests.sched.processes import processes_of
from tests.sched.scripts import RENDEZVOUS

ARGS = ("--n", "5", "--log", "--max", "--run", "--node", "--", "-m", "--", "a b", "", "--nnodes=7")
"""What torchrun would take for its own, and more."""


@pytest.mark.exhaustive
def test_what_two_replicas_are_given(
    state_dir: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their arguments as they are, of the environment a list; and nobody else can reach them.

    A scheduler that was itself started by torchrun, or by a job, does not confuse its jobs.
    """
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PIPOLLUX_JOB_ID"):
        monkeypatch.setenv(name, "outer")
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("OPERATORS_CHOICE", "passed on")
    go = tmp_path / "go"
    given = {"GO": str(go), "SEED": "3", "NCCL_DEBUG": "INFO"}
    backend = local_backend(
        cpu_nodes(node_a=1, node_b=1), state_dir, pass_environment=["OPERATORS_CHOICE"]
    )
    work = ReplicaProgram(job="meeting", script=RENDEZVOUS, args=ARGS, environment=given)
    try:
        backend.apply(work, 1, ["node-a", "node-b"])
        for replica in range(2):
            said = wait_for_text(state_dir.log("meeting", 1, replica), '"total"')
            met = json.loads(said.splitlines()[-1])
            assert met["args"] == list(ARGS)
            assert met["total"] == 2.0
            environment = met["environment"]
            assert "PGPASSWORD" not in environment
            assert "outer" not in environment.values()
            assert environment["PATH"] == os.environ["PATH"]
            assert environment["OPERATORS_CHOICE"] == "passed on"
            assert (environment["SEED"], environment["NCCL_DEBUG"]) == ("3", "INFO")
        listening = {
            connection.laddr.ip
            for process in processes_of(state_dir.path)
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening, "the store, and the collectives of each replica"
        assert all(ipaddress.ip_address(address).is_loopback for address in listening)
        go.touch()
        assert wait_for(backend, Exited) == Exited(1, Outcome.COMPLETE)
    finally:
        backend.shutdown()


@pytest.mark.parametrize(
    ("address", "listens_at"),
    [("127.0.0.1", {"127.0.0.1"}), ("localhost", {"::"}), ("127.0.0.2", {"127.0.0.2"})],
)
def test_where_the_store_of_the_agents_listens(address: str, listens_at: set[str]) -> None:
    """A name may stand for any address: what is to be reached over the network still is."""
    port = free_port()
    parameters = RendezvousParameters("pipollux", f"{address}:{port}", "run", 1, 1, rank="0")
    handler = rendezvous.create_handler(parameters)
    assert handler.get_backend() == rendezvous.BACKEND == parameters.backend
    meeting = handler.next_rendezvous()
    try:
        assert (meeting.rank, meeting.world_size) == (0, 1)
        meeting.store.set("key", "value")
        assert meeting.store.get("key") == b"value"
        found = {
            connection.laddr.ip
            for connection in psutil.Process().net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
        if not socket.has_ipv6:
            listens_at = {"0.0.0.0" if ip == "::" else ip for ip in listens_at}  # noqa: S104  # compared
        assert found == listens_at
    finally:
        del meeting, handler  # torch closes the store with its last reference


def test_the_loopback_interface_is_found() -> None:
    name = loopback_interface()
    assert name is not None
    assert "127.0.0.1" in {entry.address for entry in psutil.net_if_addrs()[name]}


@pytest.mark.parametrize(
    ("name", "value", "passes"),
    [
        ("PATH", "/bin", True),
        ("LC_ALL", "C", True),
        ("PYTHONPATH", "/srv", True),
        ("NCCL_SOCKET_IFNAME", "eth0", True),
        ("HF_HOME", "/data", True),
        ("HF_TOKEN", "x", False),
        ("TORCH_API_KEY", "x", False),
        ("PGPASSWORD", "x", False),
        ("DATABASE_URL", "postgresql://a:b@c/d", False),
        ("AWS_SECRET_ACCESS_KEY", "x", False),
        ("https_proxy", "http://proxy:3128", True),
        ("HTTPS_PROXY", "http://user:secret@proxy:3128", False),
        ("PIPOLLUX_STORE", "postgresql://a:b@c/d", False),
        ("MASTER_ADDR", "10.0.0.1", False),
        ("RANK", "0", False),
        ("PET_NNODES", "7", False),
        ("TORCHELASTIC_RUN_ID", "outer", False),
        ("PYTHON_EXEC", "/bin/sh", False),
        ("WANDB_MODE", "offline", False),
    ],
)
def test_what_is_inherited(name: str, value: str, passes: bool) -> None:
    assert (name in inherited({name: value})) is passes
    never = ("PIPOLLUX", "MASTER", "PET", "RANK", "TORCHELASTIC", "PYTHON_EXEC")
    named = not name.startswith(never)
    assert (name in inherited({name: value}, [name])) is named


LOOKING = """
import atexit, inspect, json, multiprocessing, pickle, sys

class Kept:
    x: int = 3

def square(x):
    return x * x

if __name__ == "__main__":
    atexit.register(lambda: print("at exit", sys.modules["__main__"].square(2)))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [3])
    kept = pickle.loads(pickle.dumps(Kept())).x
    print(json.dumps([sys.argv, sys.path[0], __name__, __file__, kept, squares, __spec__]))
    print(inspect.getsource(square))
    sys.exit(7)
"""
ASKING = """
import atexit, sys
atexit.register(lambda: print("ended by", repr(sys.last_value)))
raise KeyError("x")
"""

ENDS = {
    "syntax": ("def f(:\n", 1, ("SyntaxError: invalid syntax (File ", True)),
    "nul": ("x = 1\0\n", 1, ("", True)),
    "module": ("import nowhere_to_be_found\n", 1, ("ModuleNotFoundError: No module named", True)),
    "name": ("from json import nothing\n", 1, ("ImportError: cannot import name 'nothing'", True)),
    "raised": ("def f():\n    1 / 0\nf()\n", 1, ("ZeroDivisionError: division by zero", False)),
    "lines": ("raise ValueError('one\\ntwo')\n", 1, ("ValueError: one", False)),
    "hook": ("import sys\nsys.excepthook = lambda *_: print('mine')\n1 / 0\n", 1, ("Zero", False)),
    "at exit": (ASKING, 1, ("KeyError: 'x'", False)),
    "exit": ("raise SystemExit(3)\n", 3, None),
    "end": ("print('done')\n", 0, None),
    "killed": ("import os\nos.kill(os.getpid(), 9)\n", -9, None),
}
"""Scripts, how they end, and what is left of that on the disk."""


def error_in(path: Path) -> ScriptError | None:
    """Return what the agent brings of an error file."""
    return ReplicaResult.parse(agent.result_of(path, {}).model_dump_json()).error


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-u", *command],
        cwd=folder,
        env={"TORCHELASTIC_ERROR_FILE": str(folder / "error.json")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("case", ENDS)
def test_a_script_ends_as_without_us(tmp_path: Path, case: str) -> None:
    """Same status, same output; and an exception is left on the disk."""
    code, status, left = ENDS[case]
    script = tmp_path / "script.py"
    script.write_text(code)
    plain = _run([str(script)], tmp_path)
    assert error_in(tmp_path / "error.json") is None
    ours = _run([script_main.__file__, str(script)], tmp_path)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (status, ANY)
    if case != "nul":  # Python's own message has no traceback there
        assert ours.stderr == plain.stderr
    error = error_in(tmp_path / "error.json")
    if left is None:
        assert error is None
    else:
        assert error is not None
        assert error.text.startswith(left[0])
        assert error.cannot_start is left[1]


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOKING)
    args = [str(script), "--n", "--", "-m", ""]
    plain, ours = _run(args, tmp_path), _run([script_main.__file__, *args], tmp_path)
    assert (ours.returncode, ours.stdout, ours.stderr) == (7, plain.stdout, plain.stderr)
    assert "at exit 4" in ours.stdout


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    ours = _run([script_main.__file__, str(tmp_path / "gone.py")], tmp_path)
    assert ours.returncode == script_main.NO_SCRIPT
    assert "can't open file" in ours.stderr
    error = error_in(tmp_path / "error.json")
    assert error is not None
    assert error.cannot_start


def test_error_files_of_others(tmp_path: Path) -> None:
    """torchrun's agent writes them too, when it is ended itself: they tell nothing of a script."""
    path = tmp_path / "error.json"
    for content in ("", "[]", '{"message": "no"}', '{"message": {"message": "Process 5"}}'):
        path.write_text(content)
        assert error_in(path) is None
    path.write_text('{"message": {"message": ""}, "types": [], "loaded": true}')
    assert error_in(path) == ScriptError("", False)
