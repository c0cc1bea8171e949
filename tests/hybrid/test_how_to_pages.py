"""The Python of the pages for training scripts runs as it stands, and does what they say."""

from __future__ import annotations

import contextlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job import context as contexts
from tests.hybrid.models import assert_close, state_of
from tests.hybrid.stage_processes.training import run_stages

PAGES = {
    "howto/train": 5,
    "howto/data": 4,
    "howto/losses": 3,
    "howto/checkpoints": 2,
    "howto/batch-size": 2,
    "howto/profile": 2,
}
"""Pages whose blocks run one by one, each in a job of its own, and how many they have."""


class Labels(nn.Module):
    """Logits of the classes of four tokens a sample, from eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x).unflatten(1, (4, 3))
        return logits


class Recurrent(nn.Module):
    """From tokens and a hidden state for each row to logits and the next hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(10, 16), nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, hidden = batch
        logits = []
        for place in range(tokens.shape[1]):
            hidden = self.cell(self.tokens(tokens[:, place]), hidden)
            logits.append(self.head(hidden))
        return torch.stack(logits, 1), hidden


def blocks(repository: Path, page: str) -> list[str]:
    text = (repository / "docs" / f"{page}.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def names_for(block: str) -> dict[str, Any]:
    """What the words around a block take for granted."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs.sum(1, keepdim=True)
    module: nn.Sequential = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    if "labels" in block:
        targets = torch.randint(3, (256, 4))
        targets[::3, 2:] = -100  # padding
        module = nn.Sequential(Labels())
    if "BPTT" in block:
        module = nn.Sequential(Recurrent())
    frozen = "requires_grad_(True)" in block
    module[0].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "pipollux": pipollux,
        "AveragedModel": AveragedModel,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
        "inputs": inputs,
        "targets": targets,
        "dataset": TensorDataset(inputs, targets),
        "module": module,
        "optimizer": optimizer,
        "x": inputs[:16],
        "labels": targets[:16],
        "tokens": torch.randint(10, (150,)),
        "contrastive_loss": lambda output, _: output.flatten(1).square().sum(1).logsumexp(0),
    }
    return names


def run(block: str, name: str) -> dict[str, Any]:
    """Run a block in a job of its own, of one replica; what it leaves behind."""
    contexts.reset()
    names = names_for(block)
    if "HybridParallel(" not in block:
        if "AdaptiveDataLoader(" not in block:
            names["loader"] = pipollux.AdaptiveDataLoader(names["dataset"], batch_size=64)
        names["model"] = pipollux.HybridParallel(names["module"], names["optimizer"])
        steps: list[int] = []
        names["optimizer"].register_step_post_hook(lambda *_: steps.append(1))
    # What a machine without GPUs has of it.
    exec(compile(block.replace('"cuda"', '"cpu"'), name, "exec"), names)  # noqa: S102  # our page
    if "HybridParallel(" not in block:
        assert bool(steps) == ("optimizer.step()" in block or "scaler.step(" in block)
    return names


@pytest.fixture(autouse=True)
def fresh_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    contexts.reset()
    yield
    pipollux.destroy_process_group()


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(repository: Path, page: str) -> None:
    found = blocks(repository, page)
    assert len(found) == PAGES[page]
    for number, block in enumerate(found):
        run(block, f"docs/{page}.md, block {number}")


def test_the_script_trains(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(blocks(repository, "howto/train")[0], "docs/howto/train.md")
    lines = re.findall(r"^epoch (\d): loss (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [number for number, _ in lines] == ["0", "1", "2"]
    losses = [float(loss) for _, loss in lines]
    assert losses[2] < losses[0]


def test_the_mean_of_an_epoch_is_that_of_its_samples(repository: Path) -> None:
    """An accumulator's mean is close to what the model has at the end, and is over all samples."""
    names = run(blocks(repository, "howto/data")[0], "docs/howto/data.md")
    with torch.no_grad():
        whole = F.mse_loss(names["model"](names["inputs"]), names["dataset"].tensors[1])
    assert names["mean"].item() == pytest.approx(whole.item(), rel=0.1)


def test_a_weighted_loss_has_the_gradient_of_the_whole_batch(repository: Path) -> None:
    """Its divisor is that of the tokens that count, over all micro-batches."""
    block = blocks(repository, "howto/losses")[0]
    names = names_for(block)
    exec(block.partition("\n\n\nfor ")[0], names)  # noqa: S102  # our own page
    module, x, labels = names["module"], names["x"], names["labels"]
    plain = module[0].linear.weight
    F.cross_entropy(module(x).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    expected = plain.grad.clone()
    module.zero_grad()
    model = pipollux.HybridParallel(module, names["optimizer"], num_microbatches=4)
    model.train_step(x, labels, names["loss_fn"])
    torch.testing.assert_close(plain.grad, expected)


def test_a_note_is_there_after_a_restart(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(tmp_path / "saved"))
    block = blocks(repository, "howto/checkpoints")[1]
    run(block, "docs/howto/checkpoints.md")["note"].text = "kept"
    pipollux.save_all_states()
    assert run(block, "docs/howto/checkpoints.md")["note"].text == "kept"


def test_a_trace_is_written(repository: Path, tmp_path: Path) -> None:
    block = next(x for x in blocks(repository, "howto/profile") if "export_chrome_trace" in x)
    names = run(block, "docs/howto/profile.md")
    for x, y in names["loader"]:
        F.mse_loss(names["model"](x), y).backward()
        names["optimizer"].step()
    assert '"schedule_bubble"' in (tmp_path / "step.json").read_text()


def test_a_skip_connection_is_that_of_the_plain_layers(repository: Path) -> None:
    block = next(x for x in blocks(repository, "concepts/pipelines") if "stash" in x)
    names = names_for(block)
    exec(compile(block, "docs/concepts/pipelines.md", "exec"), names)  # noqa: S102  # our own page
    module, images = names["module"], torch.randn(4, 1, 8, 8)
    module(images).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = pipollux.HybridParallel(module, optimizer, balance=[1, 1, 1], num_microbatches=2)
    model(images).square().mean().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_layer_may_combine_its_buffers(repository: Path) -> None:
    block = next(x for x in blocks(repository, "concepts/pipelines") if "combined_buffers" in x)
    names = names_for(block)
    exec(compile(block, "docs/concepts/pipelines.md", "exec"), names)  # noqa: S102  # our own page
    assert isinstance(names["CountingLayer"](), pipollux.CombinesBuffers)


def run_processes(block: str) -> tuple[int, dict[str, Tensor]]:
    """Run the block in one of a replica's processes; its steps, and the parameters that it has."""
    contexts.reset()
    names = names_for(block)
    exec(compile(block, "docs/howto/multi-process.md", "exec"), names)  # noqa: S102  # our own page
    state = names["optimizer"].state[next(names["module"].parameters())]
    return int(state["step"]), state_of(names["module"])


def test_each_stage_has_a_process_and_may_load_its_part(repository: Path) -> None:
    (block,) = blocks(repository, "howto/multi-process")
    (loads_part,) = (x for x in blocks(repository, "howto/data") if "load_per_stage" in x)
    (made,) = (line for line in block.splitlines(keepends=True) if line.startswith("loader ="))
    ((first, last),) = run_stages(run_processes, 1, 2, block)
    assert first[0] == last[0] == 12
    assert sorted([*first[1], *last[1]]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    ((other, another),) = run_stages(run_processes, 1, 2, block.replace(made, loads_part))
    assert_close(other[1] | another[1], first[1] | last[1], 0.0)


def train_gpt2(block: str, folder: Path) -> list[float]:
    """Run the script of docs/howto/models.md with two layers, without dropout; return the losses
    that it reports.
    """
    contexts.reset()
    exact = block.replace("n_layer=4", "n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0")
    assert exact != block
    losses: list[float] = []
    report, pipollux.report = pipollux.report, lambda *, loss: losses.append(float(loss))
    try:
        with contextlib.chdir(folder):
            exec(compile(exact, "docs/howto/models.md", "exec"), {})  # noqa: S102  # our own page
    finally:
        pipollux.report = report
        pipollux.destroy_process_group()
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("shapes", [[(1, 1), (2, 1), (1, 2)]])
def test_gpt2_trains_alike_on_replicas_and_stages(
    repository: Path, tmp_path: Path, shapes: list[tuple[int, int]]
) -> None:
    """Its script has one result, whichever way processes are used, with a tied head."""
    from transformers import GPT2LMHeadModel

    block = blocks(repository, "howto/models")[0]
    saved = []
    for num_replicas, num_stages in shapes:
        folder = tmp_path / f"{num_replicas}x{num_stages}"
        folder.mkdir()
        environment = {"PIPOLLUX_NUM_STAGES": str(num_stages)}
        sizes = num_replicas, num_stages
        found = run_stages(train_gpt2, *sizes, block, folder, environment=environment)
        for losses in (losses for replica in found for losses in replica):
            assert len(losses) == 24
            assert losses[-1] < 0.7 * losses[0]
        model = GPT2LMHeadModel.from_pretrained(folder / "gpt2-trained")
        assert model.lm_head.weight is model.transformer.wte.weight
        saved.append(model.state_dict())
    for other in saved[1:]:
        torch.testing.assert_close(other, saved[0], rtol=1e-3, atol=2e-4)


def test_the_figure_of_the_schedules_is_drawn_by_its_script(repository: Path) -> None:
    script = repository / "docs" / "images" / "pipeline.py"
    drawn = runpy.run_path(str(script))["draw"]()
    assert drawn == script.with_suffix(".svg").read_text(encoding="utf-8")
