"""What the tests of `pipollux fit` and `pipollux predict` share: the program, and exact data."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import GoodputFunction, Layer, LayerProfile, PerfParams, perf_params_to_json
from pipollux_sched.cli import main
from tests.programs import run_pipollux

ONE_STAGE = PerfParams(0.02, 0.003, 0.05, 0.004, 0.02, 0.002, 1.6)
TWO_STAGES = PerfParams(
    0.03, 0.004, 0.06, 0.005, 0.02, 0.003, 1.5, (0.15, 0.2), (0.3, 0.35), overlap=0.8
)

INIT, SQR, VAR = 32, 1.0, 20.0

MIB = 2**20
LAYERS = LayerProfile.from_layers(
    (
        Layer(
            forward_alpha=1e-4 * alpha,
            forward_beta=2e-4 * beta,
            backward_alpha=2e-4 * alpha,
            backward_beta=3e-4 * (beta + alpha),
            parameter_bytes=parameters * MIB,
            optimizer_bytes=2 * parameters * MIB,
            activation_bytes=activations * MIB,
            output_bytes=output * MIB,
        )
        for alpha, beta, parameters, activations, output in (
            (1, 4, 2, 12, 6),
            (2, 1, 3, 9, 5),
            (1, 2, 8, 7, 1),
            (3, 5, 12, 6, 3),
            (1, 1, 20, 4, 2),
            (2, 3, 30, 3, 1),
        )
    ),
    input_bytes=MIB,
)
"""Early layers hold many activations, late ones many parameters."""


def pipollux(
    *args: str | Path, cwd: Path | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, but for the time that imports take."""
    return run_pipollux(*args, folder=cwd, stdin=stdin)


def here(capsys: pytest.CaptureFixture[str], *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, which takes a tenth of the time."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([*map(str, args)])
    said = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(args, end.value.code, said.out, said.err)


def complaints(done: subprocess.CompletedProcess[str], code: int = 2) -> list[str]:
    """The errors, after checking that there is nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("Error: ") for line in lines), done.stderr
    return [line.removeprefix("Error: ") for line in lines]


def exact_rows(
    params: PerfParams, allocations: Iterable[tuple[int, int]] = ((1, 1), (1, 2), (2, 2), (2, 4))
) -> Iterator[dict[str, Any]]:
    """Measurements of a job that is exactly as the parameters have it."""
    model = GoodputFunction(params, (1.0, 1.0), 1)
    num_stages = params.num_stages
    for num_nodes, num_replicas in allocations:
        for micro_bsz in (4, 8, 16, 32, 64):
            for num_microbatches in (1, 4) if num_stages > 1 else (1,):
                atomic_bsz = micro_bsz * num_microbatches
                times = model.step_time(num_nodes, num_replicas, atomic_bsz, 0, num_microbatches)
                compute = params.alpha_c + params.beta_c * micro_bsz
                yield {
                    "num_nodes": num_nodes,
                    "num_replicas": num_replicas,
                    "atomic_bsz": atomic_bsz,
                    "num_microbatches": num_microbatches,
                    "num_stages": num_stages,
                    "accum_step_time": times.accum_time,
                    "optim_step_time": times.optim_time,
                    "forward": [share * compute for share in params.forward_shares],
                    "backward": [share * compute for share in params.backward_shares],
                }


def lines(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as a file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def entry(params: PerfParams) -> dict[str, Any]:
    """Parameters as they stand in a params.json."""
    content = perf_params_to_json(params)
    content.pop("version")
    return {"num_stages": params.num_stages, **content}


def params_json(*models: PerfParams, **more: Any) -> dict[str, Any]:
    """The content of a params.json."""
    content = {
        "version": 1,
        "perf_params": [entry(one) for one in models],
        "init_batch_size": INIT,
        "grad_params": {"norm": SQR, "var": VAR},
    }
    return content | more


def written(folder: Path, content: Any) -> Path:
    """A params.json with this content."""
    path = folder / "params.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def predicted(path: Path, *args: str) -> dict[str, Any]:
    """What `pipollux predict` answers, as data."""
    done = pipollux("predict", path, "--output", "json", *args)
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
