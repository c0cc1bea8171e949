"""Record what a real API server answers: ``python -m tests.kubernetes.record [NAME …]``.

It takes the programs that `.ci/kubernetes` builds; what containers do also takes root.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .conversations.all import CONVERSATIONS, WITH_KUBELETS, hold
from .harness.control_plane import ControlPlane

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> Any:
    """Return the recorded answers of a conversation."""
    return json.loads((RECORDED / f"{name}.json").read_text())


def main() -> None:
    """Hold all conversations with a real control plane, and write the answers."""
    chosen = sys.argv[1:] or [*CONVERSATIONS, *WITH_KUBELETS]
    for nodes, names in ((0, CONVERSATIONS), (1, WITH_KUBELETS)):
        asked = [name for name in chosen if name in names]
        if not asked:
            continue
        with ControlPlane(nodes=nodes) as cluster:
            for name in asked:
                answers = json.dumps(hold(cluster, name), indent=1, sort_keys=True)
                (RECORDED / f"{name}.json").write_text(answers + "\n")


if __name__ == "__main__":
    main()
