"""Builds the API reference from docstrings, with pdoc.

    python docs/api.py site

One page per module that hands on names: what `pipollux` and `pipollux_perfmodel` export, and
the modules of `pipollux_sched`. Warnings of pdoc are errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
import sys
import typing
import warnings
from pathlib import Path

import pdoc

PACKAGES = (
    "pipollux",
    "pipollux_perfmodel",
    "pipollux_policies",
    "pipollux_protocol",
    "pipollux_sched",
    "pipollux_simulator",
)
WHOLE = ("pipollux_policies", "pipollux_sched", "pipollux_simulator")
"""Packages whose modules have pages of their own; of the others, the package hands on all names."""
RUN_BY_OTHERS = ("pipollux_sched.store.migrations",)
"""Modules that alembic or a job's process runs, and nothing imports."""


def main() -> None:
    """Write the pages to the folder that the command line names."""
    build(Path(sys.argv[1]), PACKAGES)


def build(folder: Path, packages: typing.Sequence[str]) -> None:
    """Write the pages of some packages to a folder.

    Raises:
        UserWarning: Something cannot be rendered, such as an annotation that names nothing.
    """
    pdoc.render.configure(docformat="google")
    chosen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for package in packages:
            _resolve_annotations("pipollux_hybrid" if package == "pipollux" else package)
            chosen += [package] if package in WHOLE else [package, rf"!{package}\..*"]
        chosen += [f"!{name}.*" for name in RUN_BY_OTHERS]
        pdoc.pdoc(*chosen, output_directory=folder)


def _resolve_annotations(package: str) -> None:
    """Put types in the place of their names where Python generates a constructor.

    pdoc looks such names up where a class is handed on, which need not know them.
    """
    root = importlib.import_module(package)
    found = pkgutil.walk_packages(root.__path__, f"{package}.")
    names = [info.name for info in found if not info.name.startswith(RUN_BY_OTHERS)]
    for module in [root, *map(importlib.import_module, names)]:
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__:
                continue
            if dataclasses.is_dataclass(kind):
                constructor = kind.__init__
            elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
                constructor = kind.__new__
            else:
                continue
            # A name that only type checkers import stays; on a page it would be a warning.
            with contextlib.suppress(NameError):
                constructor.__annotations__ = typing.get_type_hints(constructor, vars(module))


if __name__ == "__main__":
    main()
