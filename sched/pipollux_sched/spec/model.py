"""What the specifications of jobs, clusters and teams share: base class, field types, parsing.

Each problem is one sentence with the file, line, place and value, and the allowed values
(`SpecError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from pipollux_sched.utils.yaml_file import SpecError, YamlFile
from pipollux_utils.units import parse_bytes
from pipollux_utils.validation import problem_at, problems

from .names import NAME_LENGTH, schema_bounds


def _check_gpu_type(text: str) -> str:
    if not text.strip() or len(text) > NAME_LENGTH:
        raise ValueError(
            f"'{text[:20]}' is not a type of GPU; give 1 to {NAME_LENGTH} characters, as in a100"
        )
    return text


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
Count = Annotated[int, Field(ge=1)]
GpuType = Annotated[str, AfterValidator(_check_gpu_type), schema_bounds(NAME_LENGTH)]
T = TypeVar("T")
List = Annotated[tuple[T, ...], Field(strict=False)]


class Spec(BaseModel):
    """Base class: refuses unknown fields, converts no types, is immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise an error unless names at a place in a file are unique, and there are any."""
    if not names:
        raise problem_at((where,), "the list is empty; it must have at least 1 entry")
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            raise problem_at(
                (where, index, "name"),
                f"'{name}' is also the name of {where}[{first[name]}]; give each its own",
            )
        first[name] = index


M = TypeVar("M", bound=BaseModel)


def parse_model(data: Any, model: type[M], source: str) -> M:
    """Return the model in decoded JSON; raise `SpecError` with its `source` if it is invalid."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        found = problems(error.errors(include_url=False), model)
        raise SpecError(*(f"{source}: {problem.sentence()}" for problem in found)) from None


def load_model(document: YamlFile, model: type[M]) -> M:
    """Return the model in a file; raise `SpecError` with the lines of problems."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise SpecError(
            *(
                f"{document.path}:{document.line(problem.place)}: {problem.sentence()}"
                for problem in problems(error.errors(include_url=False), model, document.written)
            )
        ) from None
