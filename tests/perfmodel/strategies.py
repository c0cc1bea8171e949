"""Random jobs and configurations for the tests of the performance model."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pipollux_perfmodel import GradParams, PerfParams
from pipollux_perfmodel.timing.params import CHECKPOINTS, SCHEDULES, Checkpoints, joined_modes


def _log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.log(low), np.log(high)).map(lambda x: float(np.exp(x)))


@st.composite
def perf_params(draw: st.DrawFn, max_stages: int = 4) -> PerfParams:
    """Step time parameters over the range that real jobs have."""
    num_stages = draw(st.integers(1, max_stages))
    weights = draw(st.lists(st.floats(0.05, 1.0), min_size=2 * num_stages, max_size=2 * num_stages))
    shares = tuple(weight / sum(weights) for weight in weights)
    return PerfParams(
        alpha_c=draw(_log_uniform(1e-4, 1.0)),
        beta_c=draw(_log_uniform(1e-5, 0.1)),
        alpha_n=draw(_log_uniform(1e-3, 1.0)),
        beta_n=draw(_log_uniform(1e-5, 0.1)),
        alpha_r=draw(_log_uniform(1e-4, 0.5)),
        beta_r=draw(_log_uniform(1e-5, 0.1)),
        gamma=draw(st.floats(1.0, 10.0)),
        forward_shares=shares[:num_stages],
        backward_shares=shares[num_stages:],
        overlap=draw(st.floats(0.0, 1.0)),
    )


@st.composite
def pipelines(draw: st.DrawFn, max_stages: int = 4) -> PerfParams:
    """Step time parameters of which any may be other than its default."""
    plain = draw(perf_params(max_stages))
    num_stages = plain.num_stages
    alpha = draw(st.one_of(st.just(()), _parts(2 * num_stages)))
    schedule = draw(st.sampled_from(SCHEDULES))
    sync_every = draw(st.sampled_from((0, 0, 0, 1, 7, 100)))
    return plain._replace(
        forward_alpha_shares=alpha[:num_stages],
        backward_alpha_shares=alpha[num_stages:],
        alpha_t=draw(_copies(num_stages - 1, 0.05)),
        beta_t=draw(_copies(num_stages - 1, 0.01)),
        transfers_overlap=draw(st.booleans()),
        checkpoint=draw(_modes(num_stages)),
        gradient_shares=draw(st.one_of(st.just(()), _parts(num_stages))),
        shared_link=draw(st.booleans()),
        gamma_c=draw(st.one_of(st.just(1.0), st.floats(1.0, 10.0))),
        contention=draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        growth_n=draw(st.one_of(st.just(1.0), st.just(0.0), st.floats(-2.0, 2.0))),
        two_node_penalty=draw(st.one_of(st.just(0.0), st.floats(0.0, 3.0))),
        overhead=draw(st.one_of(st.just(0.0), st.floats(0.0, 0.5))),
        schedule=schedule,
        chunks_per_stage=draw(st.integers(1, 3)) if schedule == "interleaved" else 1,
        tied_exchange=draw(st.one_of(st.just(0.0), st.floats(0.0, 0.5))),
        sync_every=sync_every,
        sync_overlap=draw(st.integers(0, max(sync_every - 1, 0))),
    )


def _modes(num_stages: int) -> st.SearchStrategy[Checkpoints]:
    """One mode, or one of each stage, as they are written."""
    one = st.sampled_from(CHECKPOINTS)
    return st.lists(one, min_size=num_stages, max_size=num_stages).map(joined_modes) | one


def _parts(count: int) -> st.SearchStrategy[tuple[float, ...]]:
    """Numbers that sum to 1."""
    weights = st.lists(st.floats(0.05, 1.0), min_size=count, max_size=count)
    return weights.map(lambda found: tuple(weight / sum(found) for weight in found))


def _copies(count: int, most: float) -> st.SearchStrategy[tuple[float, ...]]:
    some = st.lists(st.floats(0.0, most), min_size=count, max_size=count).map(tuple)
    return st.one_of(st.just(()), some)


def grad_params() -> st.SearchStrategy[GradParams]:
    """Gradients from nearly noiseless to nearly all noise."""
    return st.builds(GradParams, _log_uniform(1e-3, 1e3), _log_uniform(1e-3, 1e3))


@st.composite
def allocations(draw: st.DrawFn, max_replicas: int = 16) -> tuple[int, int]:
    """(num_nodes, num_replicas)."""
    num_replicas = draw(st.integers(1, max_replicas))
    return draw(st.integers(1, num_replicas)), num_replicas
