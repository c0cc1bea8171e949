"""Models of many architectures as layers, compared with the originals by independent code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.models import architectures, check
from benchmarks.models.architectures import NotBuiltError, Row

USUAL = (
    *("llama", "gpt2", "mixtral", "gemma3_text", "mamba", "bert", "deberta-v2", "modernbert"),
    *("t5", "bart", "whisper", "vit", "swin", "resnet", "wav2vec2"),
)
"""Decoders, encoders, both, images and sounds; experts, tied weights, statistics, no attention."""


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
@pytest.mark.parametrize("kind", USUAL)
def test_layers_are_exact(kind: str) -> None:
    result = check.check(architectures.build(named(kind)))
    assert (result.result, result.detail) == ("exact", "")
    assert result.layers >= 5


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # those of the models
@pytest.mark.parametrize("task", [task.lower() for task in architectures.TASKS])
def test_no_layers_are_wrong(task: str) -> None:
    tried = 0
    for row in rows():
        if row.task != task or row.kind in USUAL:
            continue
        try:
            result = check.check(architectures.build(row))
        except NotBuiltError:
            continue
        tried += 1
        assert result.result != "wrong", f"{row}: {result.detail}"
        if result.result == "rejected":
            assert "cannot be made into layers" in result.detail, row
    assert tried or task in NOTHING_NEW


NOTHING_NEW = ("masked_image_modeling",)
"""Tasks whose model types all have a row of another task."""
