"""A script that is a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.spec.job import JobSpec
from pipollux_sched.spec.script import with_script_found
from pipollux_sched.utils.yaml_file import SpecError


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    job = JobSpec.model_validate({"name": "a", "script": str(tmp_path)})
    with pytest.raises(SpecError, match=f"script: {tmp_path} is a folder; give the path"):
        with_script_found(job)
