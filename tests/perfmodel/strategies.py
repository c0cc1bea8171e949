"""Random jobs and configurations for the tests of the performance model."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pipollux_perfmodel import GradParams, PerfParams


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


def grad_params() -> st.SearchStrategy[GradParams]:
    """Gradients from nearly noiseless to nearly all noise."""
    return st.builds(GradParams, _log_uniform(1e-3, 1e3), _log_uniform(1e-3, 1e3))


@st.composite
def allocations(draw: st.DrawFn, max_replicas: int = 16) -> tuple[int, int]:
    """(num_nodes, num_replicas)."""
    num_replicas = draw(st.integers(1, max_replicas))
    return draw(st.integers(1, num_replicas)), num_replicas
