"""What users can do something about is of one tree of exceptions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from pipollux_perfmodel.errors import InputError, PipolluxError

PACKAGES = ("hybrid", "perfmodel", "sched")
PYTHON_S = {"Exception", "ValueError", "RuntimeError", "TypeError", "KeyError", "OSError"}


def test_no_error_stands_beside_the_tree() -> None:
    repository = Path(__file__).parents[2]
    files = [file for name in PACKAGES for file in (repository / name).rglob("*.py")]
    sources = {file: file.read_text() for file in files}
    beside = [
        f"{file.name}: {node.name}"
        for file, text in sources.items()
        if re.search(r"class\s+\w+Error\b", text)  # parsing all takes seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.bases and node.name.endswith("Error")
        if isinstance(node.bases[0], ast.Name) and node.bases[0].id in PYTHON_S
    ]
    assert beside == ["errors.py: PipolluxError"]


def test_problems_are_sentences_of_their_own() -> None:
    error = InputError("a: is missing", "b: 0 is not allowed")
    assert str(error) == "a: is missing\nb: 0 is not allowed"
    assert error.problems == ("a: is missing", "b: 0 is not allowed")
    assert isinstance(error, ValueError)
    assert (InputError.exit_code, PipolluxError.exit_code) == (2, 1)
