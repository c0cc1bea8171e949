"""The wheel, installed with each of its extras into an environment that has nothing else."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.extent import first
from tests.programs import free_port

SCRIPT = """
import torch
from torch import nn
import pipollux

pipollux.init_process_group("gloo")
module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = pipollux.AdaptiveDataLoader(data, batch_size=8)
model = pipollux.HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
for epoch in pipollux.remaining_epochs_until(1):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
print("trained")
"""
CLUSTER = "nodes: [{name: here, kind: cpu, slots: 2}]\n"
BASE = ("autograd", "httpx", "numpy", "psutil", "pydantic", "rich", "scipy", "torch", "torchgpipe")
JOB_PACKAGES = ("hybrid", "perfmodel")
OPTIONAL = ("matplotlib", "tensorboard", "zmq")
"""Packages that only an option needs, whose error names the command that installs them."""


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = (
        "import sys\nfrom hatchling.builders.wheel import WheelBuilder\n"
        "print(next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard'])))"
    )
    folder = str(tmp_path_factory.mktemp("wheel"))
    built = subprocess.run(
        [sys.executable, "-c", code, str(repository), folder],
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(built.stdout.strip())


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def declared(wheel: Path) -> list[str]:
    """Return the requirements that the wheel declares."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)


def requirements(lines: list[str], extras: set[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            yield requirement


def wanted(wheel: Path, extra: str) -> list[metadata.Distribution]:
    """Return the distributions that an installation of the wheel would bring, and no others."""
    own = declared(wheel)
    found: dict[str, metadata.Distribution] = {}
    waiting = [(own, {extra})]
    done: set[tuple[str, ...]] = set()
    while waiting:
        lines, extras = waiting.pop()
        for requirement in requirements(lines, extras):
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if name == "pipollux":
                waiting.append((own, set(requirement.extras)))
                continue
            key = (name, *sorted(requirement.extras))
            if key in done:
                continue
            done.add(key)
            found[name] = metadata.distribution(requirement.name)
            waiting.append((found[name].requires or [], set(requirement.extras)))
    return list(found.values())


class Environment:
    """A virtual environment with the wheel and the distributions that it asks for.

    They are linked from the environment of the tests, which takes no time and no network.

    Args:
        unpacked: the content of the wheel, which is linked too: it is compiled once for all.
    """

    def __init__(self, folder: Path, wheel: Path, unpacked: Path, extra: str) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        sources = list(unpacked.iterdir())
        for distribution in wanted(wheel, extra):
            names = {path.parts[0] for path in distribution.files or []} - {".."}
            sources += [Path(str(distribution.locate_file(name))) for name in names]
        for source in sources:
            target = packages / source.name
            if source.exists() and not target.exists():
                target.symlink_to(source)
        self.command = [str(self.python), "-c", "from pipollux_sched.command import main; main()"]
        self.environ = {"PATH": f"{self.python.parent}:{os.environ['PATH']}", "HOME": str(folder)}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=self.environ, check=False
        )


@pytest.mark.parametrize("extra", first(1, ["", "sched", "all"]))
def test_what_each_installation_can_do(
    wheel: Path, unpacked: Path, extra: str, tmp_path: Path
) -> None:
    check(Environment(tmp_path / "venv", wheel, unpacked, extra), extra, tmp_path)


def check(environment: Environment, extra: str, folder: Path) -> None:
    script, cluster = folder / "train.py", folder / "cluster.yaml"
    script.write_text(SCRIPT)
    cluster.write_text(CLUSTER)
    if extra != "sched":  # whose packages are between those of the two others
        trained = environment.run(str(environment.python), str(script))
        assert (trained.returncode, trained.stdout) == (0, "trained\n"), trained.stderr
    jobs = folder / "jobs.yaml"
    jobs.write_text(f"jobs: [{{name: one, script: {script}, num_stages: 2}}]\n")
    plan = environment.run(
        *environment.command, "plan", "--cluster", str(cluster), "--jobs", str(jobs)
    )
    if not extra:
        assert plan.returncode == 2
        assert "pip install 'pipollux[sched]'" in plan.stderr
        return
    assert plan.returncode == 0, plan.stderr
    assert "one" in plan.stdout
    serves(environment, cluster, folder)


def serves(environment: Environment, cluster: Path, folder: Path) -> None:
    """Serve until it is ready, and stop."""
    state, port = folder / "state", free_port()
    options = ["--cluster", str(cluster), "--state-dir", str(state), "--port", str(port)]
    serving = subprocess.Popen(
        [*environment.command, "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment.environ,
    )
    try:
        assert serving.stdout is not None
        said = []
        for line in serving.stdout:
            said.append(line)
            if f":{port}" in line:
                break
        else:
            pytest.fail("".join(said))
        listed = environment.run(*environment.command, "jobs", "--state-dir", str(state))
        assert listed.returncode == 0, listed.stderr
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=60)
        assert serving.returncode == 0
    finally:
        serving.kill()
        serving.wait()


def test_a_job_s_container_needs_few_packages(wheel: Path) -> None:
    with_scheduler = {x.name.lower() for x in wanted(wheel, "sched")}
    job = {x.name.lower() for x in wanted(wheel, "")}
    assert set(BASE) < job < with_scheduler < {x.name.lower() for x in wanted(wheel, "all")}
    assert not job & {"fastapi", "sqlalchemy", "typer", "textual", "matplotlib", "pymoo"}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through statements alone, of which most nodes are no part."""
    yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inside = getattr(node, field, None)
        for child in inside if isinstance(inside, list) else ():
            yield from statements(child)


def imports(folder: Path) -> dict[str, set[str]]:
    """Return the packages that modules import, by those that do."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(path))
    return {x: who for x, who in found.items() if x not in sys.stdlib_module_names}


@pytest.fixture(scope="module")
def providers() -> Mapping[str, list[str]]:
    """The distributions that have each package."""
    return metadata.packages_distributions()


@pytest.mark.parametrize(("folders", "extra"), [(JOB_PACKAGES, ""), (("sched",), "all")])
def test_every_import_is_declared(
    repository: Path,
    wheel: Path,
    providers: Mapping[str, list[str]],
    folders: tuple[str, ...],
    extra: str,
) -> None:
    extras = {extra, "sched", "kubernetes", "postgres", "demo", "sweep"} if extra else set()
    required = requirements(declared(wheel), extras)
    names = {re.sub(r"[-_.]+", "-", x.name).lower() for x in required}
    for folder in folders:
        for package, who in imports(repository / folder).items():
            if package.startswith("pipollux"):
                continue
            if package in OPTIONAL or (package == "torch" and folder == "sched"):
                continue
            by = {re.sub(r"[-_.]+", "-", x).lower() for x in providers.get(package, [])}
            assert by & names, f"{package} is imported by {sorted(who)[:3]}"


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)  # a minute or two each on an idle machine, with pip
@pytest.mark.parametrize("extra", ["", "sched", "all"])
def test_pip_installs_the_wheel(repository: Path, wheel: Path, extra: str, tmp_path: Path) -> None:
    """As a user does it; where there is no index of packages, this fails."""
    environment = Environment.__new__(Environment)
    venv.create(tmp_path / "venv", with_pip=True)
    environment.python = tmp_path / "venv" / "bin" / "python"
    environment.environ = {**os.environ, "HOME": str(tmp_path)}
    environment.command = [str(environment.python.with_name("pipollux"))]
    pip = [str(environment.python), "-m", "pip", "install", "--quiet"]
    for what in ("torch==2.13.0", f"{wheel}[{extra}]" if extra else str(wheel)):
        subprocess.run(
            [*pip, "--constraint", str(repository / "constraints.txt"), what],
            check=True,
            timeout=900,
        )
    check(environment, extra, tmp_path)
