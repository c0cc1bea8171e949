"""Reading of YAML files, with the line of each value; a duplicate key is an error."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipollux_sched.errors import InputError
from pipollux_utils.text_file import read_text_file


class SpecError(InputError):
    """An invalid description of a cluster or a job; the problems name file and place."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in lines:
                    raise yaml.constructor.ConstructorError(
                        problem=f"'{key.value}' is repeated here "
                        f"(first in line {lines[key.value]}); keep one of them",
                        problem_mark=key.start_mark,
                    )
                lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class YamlFile:
    """One YAML file: its data, and the line of each value."""

    path: Path
    data: Any
    root: yaml.Node

    def line(self, place: Sequence[int | str]) -> int:
        """Return the line (from 1) of a place, such as ``("nodes", 1)``, or its parent."""
        node, line = self.root, self.root.start_mark.line
        for step in place:
            if isinstance(node, yaml.MappingNode):
                found = [(key, value) for key, value in node.value if key.value == str(step)]
                if not found:
                    break
                line, node = found[0][0].start_mark.line, found[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                node = node.value[step]
                line = node.start_mark.line
            else:
                break
        return line + 1

    def written(self, place: Sequence[int | str]) -> str | None:
        """Return the text of a scalar as the file has it: ``0755``, not 493. Else None."""
        node = self.root
        for step in place:
            inside: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                inside = [value for key, value in node.value if key.value == str(step)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                inside = node.value[step : step + 1]
            if not inside:
                return None
            node = inside[0]
        return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def read_yaml_file(path: str | Path, example: str) -> YamlFile:
    """Return the contents of one YAML file; `example` is the required first line of such a file.

    `SpecError`: the file is missing, unreadable, empty, or not YAML.
    """
    path = Path(path)
    return parse_yaml(read_text_file(path, SpecError), path, example)


def parse_yaml(text: str, path: Path, example: str) -> YamlFile:
    """Return the contents of a YAML file from its text; see `read_yaml_file`."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            data = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = error.problem or error.context or "unreadable"
        if reason.startswith("but "):
            reason = f"{error.context} {reason}"
        raise SpecError(f"{path}{where}: not valid YAML: {reason}") from None
    except (yaml.YAMLError, ValueError) as error:
        # An impossible date is a ValueError, a control character a ReaderError without a mark.
        reason = " ".join(str(error).split())
        raise SpecError(f"{path}: not valid YAML: {reason}") from None
    except RecursionError:
        raise SpecError(f"{path}: not valid YAML: nested too deeply") from None
    if root is None or data is None:
        raise SpecError(f"{path}: the file is empty; it must begin with '{example}'")
    return YamlFile(path, data, root)
