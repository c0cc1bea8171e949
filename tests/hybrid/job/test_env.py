"""What a replica reads from its environment."""

from __future__ import annotations

import re

import pytest

from pipollux_hybrid import ConfigurationError
from pipollux_hybrid.job.env import JobEnvironment


@pytest.mark.parametrize(
    ("text", "threads"),
    [(None, None), ("", None), ("  ", None), ("4", 4), ("4,2", 4), (" 3 , 1,1 ", 3)],
)
def test_threads_as_openmp_reads_them(text: str | None, threads: int | None) -> None:
    environ = {} if text is None else {"OMP_NUM_THREADS": text}
    assert JobEnvironment.read(environ).num_threads == threads


@pytest.mark.parametrize("text", ["0", "-1", "four", "4,", ",4", "4,two", "1.5", "٤"])
def test_threads_that_are_none(text: str) -> None:
    sentence = f"environment variable OMP_NUM_THREADS={text!r}: a whole number of at least 1, or"
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        JobEnvironment.read({"OMP_NUM_THREADS": text})
