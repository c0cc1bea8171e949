"""Hints as a small job sends them, which nobody doubts."""

from __future__ import annotations

from typing import Any

PERF = {
    "alpha_c": 0.02,
    "beta_c": 0.004,
    "alpha_n": 0.05,
    "beta_n": 0.01,
    "alpha_r": 0.02,
    "beta_r": 0.003,
    "gamma": 1.8,
}
SANE: dict[str, Any] = {
    "initBatchSize": 32,
    "maxBatchSize": 1024,
    "localBszBounds": [8, 128],
    "maxProfiledReplicas": 2,
    "gradParams": {"norm": 0.002, "var": 0.04},
    "perfParams": PERF,
}
