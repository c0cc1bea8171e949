"""The scheduler's environment variables that jobs inherit: necessary ones, without secrets.

Its environment may contain passwords and tokens. So jobs get only the variables listed here, and
those that its operator names (``pipollux serve --pass-environment NAME``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pipollux_sched.spec.variables import is_reserved

NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ", "LANG", "LANGUAGE"),
        *("TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    )
)
FAMILIES = (
    *("LC_", "XDG_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "HIP_", "HSA_", "ROCR_", "RCCL_"),
    *("MIOPEN_", "GLOO_", "UCX_", "UCC_", "FI_"),
)
"""Prefixes of variables that are passed on, except names that look like a secret."""
PROXIES = frozenset(("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"))
"""Variables, in lower or upper case, that are passed on if their value holds no password."""

_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE", re.IGNORECASE)


def inherited(environment: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """Return the part of an environment that jobs inherit.

    Example:
        >>> inherited({"PATH": "/bin", "PGPASSWORD": "x", "WANDB_MODE": "offline"}, ["WANDB_MODE"])
        {'PATH': '/bin', 'WANDB_MODE': 'offline'}
    """
    return {
        name: value
        for name, value in environment.items()
        if not is_reserved(name) and (name in more or _passes(name, value))
    }


def _passes(name: str, value: str) -> bool:
    if name.lower() in PROXIES:
        return "@" not in value
    return name in NAMES or (name.startswith(FAMILIES) and not _SECRET.search(name))
