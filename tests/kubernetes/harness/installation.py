"""Where the programs of a real Kubernetes are, which `.ci/kubernetes` builds."""

from __future__ import annotations

import os
from pathlib import Path

from tests.hosts.harness import hosts

CONTROL_PLANE = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "apiextensions-apiserver",
    "kubectl",
)
NODE = ("kubelet", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "busybox")
PLUGINS = ("bridge", "host-local", "loopback")
CGROUPS = Path("/sys/fs/cgroup")


def folder() -> Path:
    """Return the folder that `.ci/kubernetes` builds into."""
    usual = Path.home() / ".cache/pipollux/kubernetes"
    return Path(os.environ.get("PIPOLLUX_KUBERNETES") or usual)


def why_not(*, nodes: bool = False) -> str | None:
    """Say why there can be no real control plane here, None if there can.

    Args:
        nodes: with kubelets, which need root.
    """
    programs = [f"bin/{name}" for name in CONTROL_PLANE]
    if nodes:
        programs += [f"bin/{name}" for name in NODE] + [f"cni/{name}" for name in PLUGINS]
    missing = [program for program in programs if not (folder() / program).exists()]
    if missing:
        return f"{folder()} has no {missing[0]}"
    if not nodes:
        return None
    if not (CGROUPS / "cpuset/cgroup.procs").exists():
        return "its kubelets need cgroups of version 1"
    return hosts.why_not()
