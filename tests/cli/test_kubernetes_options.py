"""Options of `pipollux serve --backend kubernetes` about the templates of jobs."""

from __future__ import annotations

import pytest
import typer

from pipollux_sched.cli.serve_kubernetes_options import KubernetesFlags, kubernetes_options


def test_pod_security_and_service_accounts() -> None:
    usual = kubernetes_options("kubernetes", KubernetesFlags())
    assert usual is not None
    assert (usual.pod_security, usual.service_accounts) == ("restricted", ())
    given = KubernetesFlags(pod_security="baseline", service_accounts=["reader", "writer"])
    chosen = kubernetes_options("kubernetes", given)
    assert chosen is not None
    assert (chosen.pod_security, chosen.service_accounts) == ("baseline", ("reader", "writer"))


def test_what_is_no_level_is_refused() -> None:
    with pytest.raises(typer.BadParameter) as refused:
        kubernetes_options("kubernetes", KubernetesFlags(pod_security="none"))
    assert refused.value.message == "'none' is not restricted, baseline or privileged"
    assert refused.value.param_hint == "'--pod-security'"
    with pytest.raises(typer.BadParameter, match="needs --backend kubernetes"):
        kubernetes_options("local", KubernetesFlags(pod_security="baseline"))
