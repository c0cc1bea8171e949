"""Real services that some tests need, which `.ci/services` installs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from tests.hosts.harness import hosts, slurm
from tests.kubernetes.harness import installation


def service_missing(reason: str, remedy: str = ".ci/services installs it") -> NoReturn:
    """Skip a test for want of a service; in continuous integration it fails.

    Args:
        reason: what is not there, such as "there is no Chromium".
        remedy: what there is to do about it.
    """
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(f"{reason}; {remedy}")
    pytest.fail(f"{reason}, and in continuous integration nothing may be left out", pytrace=False)


def require_hosts() -> None:
    """Skip a test where hosts cannot be made in network namespaces."""
    if reason := hosts.why_not():
        service_missing(reason, "run pytest as root, where .ci/services has installed iproute2")


def require_slurm() -> None:
    """Skip a test where there can be no Slurm on such hosts."""
    if reason := slurm.why_not():
        service_missing(reason, "run pytest as root, where .ci/services has installed slurm-wlm")


def require_kubernetes(*, nodes: bool = False) -> None:
    """Skip a test where there can be no real Kubernetes.

    In continuous integration too: there it is built apart, and the cluster in memory does instead.

    Args:
        nodes: with kubelets, which take root.
    """
    if reason := installation.why_not(nodes=nodes):
        pytest.skip(f"{reason}; .ci/kubernetes builds it")
