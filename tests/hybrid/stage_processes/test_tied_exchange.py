"""The exchange of gradients that stages share: in traces, in measurements, in the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel.timing.step_time import step_time
from tests.hybrid.stage_processes.tied import BATCH_SIZE, data_of, make
from tests.hybrid.stage_processes.training import run_stages
from tests.hybrid.traces import rows_of


def measured(folder: Path) -> tuple[float, list[float]]:
    """Train until a step was traced; the exchange as the model has it, and as it was measured."""
    init_process_group("gloo")
    env = context().env
    module = make("language")
    loader = AdaptiveDataLoader(data_of("language", 12 * BATCH_SIZE), batch_size=BATCH_SIZE)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, balance=[2, 3], num_microbatches=3)
    model.export_chrome_trace(folder / f"{env.stage}.json")
    for inputs, targets in loader:
        optimizer.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        optimizer.step()
    metrics = context().component(Metrics)
    metrics.fit()
    assert metrics.perf_params is not None
    (summary,) = metrics.profile.own().values()
    params, zero = metrics.perf_params, metrics.perf_params._replace(tied_exchange=0.0)
    with_it, without = (step_time(x, 1, 1, np.array(16), 0, 3).optim_time for x in (params, zero))
    return params.tied_exchange, [summary.exchange, float(with_it - without)]


@pytest.mark.exhaustive
def test_the_exchange_is_traced_and_modelled(tmp_path: Path) -> None:
    """Both stages' rows show it, after all that is computed; one replica has an optimizer step that
    is longer by it.
    """
    ((first, second),) = run_stages(measured, 1, 2, tmp_path)
    assert first[0] == second[0] > 0.0, "both have what the slower one took"
    for exchange, found in (first, second):
        assert found == pytest.approx([exchange] * 2)
    weight = make("language")[4].weight
    assert isinstance(weight, Tensor)
    for stage in (0, 1):
        trace = json.loads((tmp_path / f"{stage}.json").read_text())
        rows = rows_of(trace)
        ends = [x["ts"] + x["dur"] for k in (0, 1) for x in rows[f"stage {k} (cpu)"]]
        for k in (0, 1):
            (exchange,) = rows[f"stage {k}: tied gradients"]
            assert exchange["args"] == {"bytes": weight.numel() * weight.element_size()}
            assert exchange["ts"] >= max(ends)
            assert exchange["dur"] > 0.0
