"""Random models train as the plain model does, or are refused before the first wrong step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import Tensor

from tests.extent import examples
from tests.hybrid.models import assert_close
from tests.hybrid.random_models import (
    STEPS,
    Spec,
    Trained,
    train_pipeline,
    train_plain,
    whole_masks,
)
from tests.hybrid.stage_processes.training import run_stages

KINDS = (
    *("linear", "tanh", "shared", "unused", "use", "drop", "mutate", "widen"),
    *("inplace", "relu", "sometimes", "dropout"),
)
CONTENTS = ("branch", "unused", "integers", "booleans", "detached", "mask", "square")
PACKS = [f"{c} {content}" for c in ("tuple", "list", "dict") for content in CONTENTS]
LAYERS = st.one_of(
    st.sampled_from(KINDS).map(lambda kind: (kind, "")),
    st.sampled_from(PACKS).map(lambda extra: ("pack", extra)),
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    schedule = draw(st.sampled_from([None, "1f1b", "gpipe", "interleaved"]))
    parts = 4 if schedule == "interleaved" else draw(st.sampled_from([2, 2, 3]))
    layers = draw(st.lists(LAYERS, min_size=max(parts - 1, 2), max_size=6))
    cuts = draw(
        st.lists(
            st.integers(1, len(layers)), min_size=parts - 1, max_size=parts - 1, unique=True
        ).map(sorted)
    )
    ends = [0, *cuts, len(layers) + 1]
    loss = draw(st.sampled_from(["mean", "mean", "summed", "ignoring", "weighing", "contrasting"]))
    # Of a loss that is no mean over samples each replica has its own.
    alone = loss not in ("mean", "summed")
    return Spec(
        layers=tuple(layers),
        loss=loss,
        scope=draw(st.sampled_from([None, "batch"])),
        batch_size=draw(st.integers(5, 13)),
        num_microbatches=draw(st.integers(1, 5)),
        checkpoint=draw(st.sampled_from(["always", "except_last", "never"])),
        schedule=schedule,
        balance=tuple(b - a for a, b in itertools.pairwise(ends)),
        num_replicas=1 if alone else draw(st.sampled_from([1, 1, 2])),
        adam=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def may_be_refused(spec: Spec) -> bool:
    """Whether the documentation says that this may be refused."""
    apart = spec.schedule is not None
    unknown_scope = apart and spec.scope is None and spec.loss not in ("mean", "summed")
    ties = [kind for kind, _ in spec.layers].count("shared") > 1
    changes_input = any(kind in ("inplace", "relu") for kind, _ in spec.layers)
    return unknown_scope or ties or changes_input


def merged(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the processes of a replica have together; they may share parameters."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            torch.testing.assert_close(whole.setdefault(name, tensor), tensor, rtol=0, atol=1e-12)
    return whole


def only(found: dict[str, Tensor], names: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain model names what is shared once."""
    return {name: tensor for name, tensor in found.items() if name in names}


def plain_trains(spec: Spec) -> bool:
    """Whether no layer changes a tensor in place that the backward needs."""
    try:
        train_plain(spec, {})
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    return True


def check(spec: Spec) -> None:
    assume(plain_trains(spec))
    replicas: list[list[Trained]] = run_stages(
        train_pipeline, spec.num_replicas, spec.num_processes, spec
    )
    everyone = [process for replica in replicas for process in replica]
    said = [process.refused for process in everyone if process.refused]
    event("refused" if said else "trained")
    assert not said or may_be_refused(spec), said
    (steps,) = {process.steps for process in everyone}
    assert steps < STEPS or not said
    expected = train_plain(spec, whole_masks(spec, replicas, steps))
    for replica in replicas:
        for step, gradient in enumerate(expected.gradients[:steps]):
            found = merged([process.gradients[step] for process in replica])
            assert_close(only(found, gradient) if spec.schedule else found, gradient, 1e-9)
        losses = [process.losses[:steps] for process in replica]
        if spec.num_replicas == 1:
            torch.testing.assert_close(losses[-1], expected.losses[:steps], rtol=1e-9, atol=1e-12)
        if not said:
            state = merged([process.state for process in replica])
            assert_close(only(state, expected.state), expected.state, 1e-7)


@examples(12, 300)
@given(specs())
def test_random_models(spec: Spec) -> None:
    check(spec)
