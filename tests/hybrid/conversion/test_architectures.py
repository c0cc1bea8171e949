"""Models of many architectures as layers, compared with the originals by independent code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.models import architectures, check
from benchmarks.models.architectures import Row
from tests.extent import first

USUAL = (
    *("mixtral", "bert", "vit", "gpt2", "llama", "t5", "whisper", "resnet"),
    *("mamba", "wav2vec2", "gemma3_text", "deberta-v2", "modernbert", "bart", "swin"),
)
"""Decoders, encoders, both, images and sounds; experts, tied weights, statistics, no attention.

Other tests of this folder train gpt2, llama, t5 and whisper.
"""

RESULTS = Path(architectures.__file__).with_name("results.json")
OTHERS = {
    row["kind"]: row["result"]
    for row in json.loads(RESULTS.read_text()).values()
    if row["source"] == "transformers" and row["kind"] not in USUAL
    if row["result"] != "not tried"
}
"""Results of the benchmark's other rows."""


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def rows() -> list[Row]:
    return architectures.rows()


def named(kind: str) -> Row:
    return next(row for row in rows() if row.kind == kind)


@pytest.mark.filterwarnings("ignore")  # those of the models
@pytest.mark.parametrize("kind", first(3, USUAL))
def test_layers_are_exact(kind: str) -> None:
    result = check.check(architectures.build(named(kind)))
    assert (result.result, result.detail) == ("exact", "")
    assert result.layers >= 5


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # those of the models
@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_results_are_those_of_the_benchmark(kind: str) -> None:
    result = check.check(architectures.build(named(kind)))
    assert result.result == OTHERS[kind], result.detail
    if result.result == "rejected":
        assert "cannot be made into layers" in result.detail
