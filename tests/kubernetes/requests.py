"""Which requests schedulers make, and which ones `deploy/kubernetes` grants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipollux_sched.backend.kubernetes import api
from pipollux_sched.backend.kubernetes import watches as watches_module

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
VERBS = {"post": "create"}


def documents(name: str) -> list[Any]:
    """Return the documents of a file of `deploy/kubernetes`."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def granted(name: str) -> set[tuple[str, str]]:
    """Return the verbs and kinds that the roles of a file grant."""
    return {
        (verb, f"{resource}.{group}".rstrip("."))
        for part in documents(name)
        for rule in part.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def record_requests(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Return what will hold the verbs and kinds of all requests that engines make from now on."""
    found: set[tuple[str, str]] = set()

    def recording(kind: type[Any]) -> type[Any]:
        class Recording(kind):  # type: ignore[misc]  # one of two classes
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **more)
                prepare = self._client.prepare_request

                def note(
                    method: str, res: Any = None, obj: Any = None, *rest: Any, **more: Any
                ) -> Any:
                    watches = more.get("watch") or (len(rest) > 2 and rest[2])
                    info = (res or type(obj))._api_info
                    name = f"{info.plural}/{info.action}" if info.action else info.plural
                    group = (info.parent or info.resource).group
                    verb = "watch" if watches else VERBS.get(method, method)
                    found.add((verb, f"{name}.{group}".rstrip(".")))
                    return prepare(method, res, obj, *rest, **more)

                self._client.prepare_request = note

        return Recording

    monkeypatch.setattr(api, "Client", recording(api.Client))
    monkeypatch.setattr(watches_module, "AsyncClient", recording(watches_module.AsyncClient))
    return found
