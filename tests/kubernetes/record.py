"""Record what a real API server answers: ``python -m tests.kubernetes.record``.

It takes the programs that `.ci/kubernetes` builds, and no root.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .conversations import CONVERSATIONS, hold
from .harness.control_plane import ControlPlane

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> Any:
    """Return the recorded answers of a conversation."""
    return json.loads((RECORDED / f"{name}.json").read_text())


def main() -> None:
    """Hold all conversations with a real control plane, and write the answers."""
    with ControlPlane() as cluster:
        for name in CONVERSATIONS:
            answers = json.dumps(hold(cluster, name), indent=1, sort_keys=True)
            (RECORDED / f"{name}.json").write_text(answers + "\n")


if __name__ == "__main__":
    main()
