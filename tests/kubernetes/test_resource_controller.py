"""Jobs and resources that are in step cost nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Never

import pytest

from pipollux_sched.backend.kubernetes import resource_controller
from pipollux_sched.backend.kubernetes.api import Job, Object
from pipollux_sched.backend.kubernetes.informer import Informer, Selection
from pipollux_sched.backend.kubernetes.job_resource import JobResource, job_status, view_job
from pipollux_sched.backend.kubernetes.options import KubernetesOptions
from pipollux_sched.backend.kubernetes.resource_controller import ResourceController
from pipollux_sched.controller.controller import StoredJobs
from pipollux_sched.lifecycle import Allocate
from pipollux_sched.store import StateDir, Store


class LookedError(Exception):
    """A status was composed."""


def refuse(*_: Any) -> Never:
    raise LookedError


def test_what_is_in_step_is_looked_at_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    (directory.path / "kubernetes.id").write_text("me")
    spec = {"script": "/a.py", "suspend": False}
    resource: Object = {"metadata": {"name": "a", "uid": "1"}, "spec": spec}
    resources: Informer[JobResource] = Informer(Selection(Job), view_job)
    with Store(directory.store, create=True) as store:
        store.submit("a", {"name": "a", "script": "/a.py"}, "token", max_restarts=3)
        directory.job("a").mkdir(parents=True)
        link = directory.job("a") / "kubernetes.json"
        link.write_text(json.dumps({"uid": "1", "suspend": False}))
        status = job_status(store.job("a"), view_job(resource), "me", None)
        resource |= {"status": status}
        resources.replace(dict(filter(None, [resources.read(resource)])), "5")
        controller = ResourceController(None, resources, directory, KubernetesOptions())  # type: ignore[arg-type]  # no API
        jobs = StoredJobs(store, None)  # type: ignore[arg-type]  # no command is given
        assert controller.step(jobs)
        monkeypatch.setattr(resource_controller, "job_status", refuse)
        assert controller.step(jobs)
        resource["metadata"] |= {"resourceVersion": "6", "generation": 2}
        resources.apply("MODIFIED", resource)
        with pytest.raises(LookedError):
            controller.step(jobs)
        monkeypatch.undo()
        resource["metadata"]["resourceVersion"] = "7"
        resources.apply("MODIFIED", resource | {"status": status | {"observedGeneration": 2}})
        assert controller.step(jobs)
        monkeypatch.setattr(resource_controller, "job_status", refuse)
        assert controller.step(jobs)
        store.transition("a", Allocate(("n1",), "there is room"))
        with pytest.raises(LookedError):
            controller.step(jobs)
