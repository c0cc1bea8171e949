"""Sweeps: many trials of one job with different parameters, in the job file.

The text of an argument may contain ``{lr}`` for the value of the parameter ``lr``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from pipollux_protocol.environment import parameter_text
from pipollux_utils.validation import problem_at

MOST_TRIALS = 10_000
MOST_PARAMETERS = 100
_MOST_OF_NAME = 100
_MOST_OF_VALUE = 10_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")

T = TypeVar("T")


def _as_number(value: Any) -> Any:
    """Return the number that YAML 1.1 takes for a text, as in ``1e-4``."""
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def _check_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, str) and (len(value) > _MOST_OF_VALUE or "\0" in value):
        raise ValueError(f"has NUL, or more than {_MOST_OF_VALUE} characters")
    return value


def _check_name(name: str) -> str:
    if len(name) > _MOST_OF_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"'{name[:80]}' is not the name of a parameter; use letters, digits and '_', and no "
            "digit at the beginning"
        )
    return name


ParameterName = Annotated[str, AfterValidator(_check_name)]
Value = Annotated[
    StrictBool | StrictInt | StrictFloat | StrictStr,
    BeforeValidator(_as_number),
    AfterValidator(_check_value),
]
Bound = Annotated[
    StrictInt | StrictFloat, BeforeValidator(_as_number), AfterValidator(_check_value)
]
_List = Annotated[tuple[T, ...], Field(strict=False)]
Parameters: TypeAlias = Mapping[str, bool | int | float | str]
"""The values of the parameters of one trial."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SearchRange(_Part):
    """The values that a search may choose from: numbers in a range, or `choices`."""

    low: Bound | None = Field(default=None, description="a number")
    """Smallest value. With two whole numbers, the values are whole, too."""
    high: Bound | None = Field(default=None, description="a number")
    """Largest value."""
    log: bool = Field(default=False, description="true or false")
    """Whether the logarithm of the value is uniform: for learning rates and sizes."""
    step: Bound | None = Field(default=None, description="a number above 0")
    """Distance between values, from `low` on; none: every number, or every whole number."""
    choices: _List[Value] = Field(default=(), description="a list of values")
    """The values, in place of a range."""

    @property
    def is_whole(self) -> bool:
        """Whether the range is one of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.choices:
            if (self.low, self.high, self.step, self.log) != (None, None, None, False):
                raise problem_at(("choices",), "excludes low, high, log and step; leave those out")
            return self
        if "choices" in self.model_fields_set and self.low is None and self.high is None:
            raise problem_at(("choices",), "is empty; give at least one value")
        if self.low is None or self.high is None:
            raise problem_at(
                ("low",) if self.low is None else ("high",),
                "is missing; give low and high, or choices",
            )
        if self.low >= self.high:
            raise problem_at(("low",), f"{self.low} is not less than high = {self.high}")
        if self.log and self.low <= 0:
            raise problem_at(("low",), f"{self.low} has no logarithm; give a number above 0")
        if self.step is not None:
            self._check_step(self.step)
        return self

    def _check_step(self, step: float) -> None:
        if step <= 0 or (self.is_whole and not isinstance(step, int)):
            kind = "whole number" if self.is_whole else "number"
            raise problem_at(("step",), f"{step} is not a {kind} above 0")
        if self.log:
            raise problem_at(("step",), "excludes log; leave one of them out")


class SweepSpec(_Part):
    """A sweep: a `grid`, a `list` or a `search` of parameters."""

    grid: dict[ParameterName, _List[Value]] = Field(
        default={}, description="a mapping of names to lists of values"
    )
    """Values of each parameter; every combination is a trial."""
    list: _List[dict[ParameterName, Value]] = Field(
        default=(), description="a list of mappings of names to values"
    )
    """The parameters of each trial."""
    search: dict[ParameterName, SearchRange] = Field(
        default={}, description="a mapping of names to [ranges](#search-ranges)"
    )
    """Ranges from which Optuna proposes the parameters of trials, given the results so far."""
    trials: int | None = Field(
        default=None, ge=1, le=MOST_TRIALS, description=f"a whole number from 1 to {MOST_TRIALS}"
    )
    """Number of trials of a `search`."""
    sampler: Literal["tpe", "random"] = "tpe"
    """How a `search` proposes parameters: Optuna's TPESampler or RandomSampler."""
    seed: int = Field(default=0, ge=0, le=2**31, description=f"a whole number from 0 to {2**31}")
    """Seed of the sampler."""
    pruner: Literal["none", "median", "halving", "hyperband"] = "none"
    """How hopeless trials are found while they run: by Optuna's MedianPruner,
    SuccessiveHalvingPruner or HyperbandPruner."""
    warmup: int = Field(default=1, ge=1, le=10**9, description=f"a whole number from 1 to {10**9}")
    """Steps of the metric, by default epochs, before a trial may be pruned."""
    metric: str = Field(
        default="loss",
        min_length=1,
        max_length=_MOST_OF_NAME,
        description=f"a name of 1 to {_MOST_OF_NAME} characters, as in accuracy",
    )
    """Metric of trials, as in `pipollux.report_metric(accuracy=0.9)`. Without reports of `loss`,
    the mean of `pipollux.report(loss=…)` in each epoch."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Whether small or large values of the metric are better."""
    max_parallel: int | None = Field(default=None, ge=1, description="a whole number of at least 1")
    """Largest number of unfinished trials; none: as many as fit on the cluster's slots."""
    max_replicas: int | None = Field(default=None, ge=1, description="a whole number of at least 1")
    """Largest number of replicas of all trials together; none: unlimited."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("grid", "list", "search") if getattr(self, name)]
        if len(given) != 1:
            raise problem_at(
                (),
                f"has {' and '.join(given) if given else 'no parameters'}; give one of grid, list "
                "and search",
            )
        if (self.trials is None) == bool(self.search):
            raise problem_at(
                ("trials",),
                "is missing; give the number of trials of the search"
                if self.search
                else "is for a search; leave it out",
            )
        empty = next((name for name, values in self.grid.items() if not values), None)
        if empty is not None:
            raise problem_at(("grid", empty), "has no values; give at least one")
        if self.num_trials > MOST_TRIALS:
            raise problem_at(
                tuple(given), f"makes {self.num_trials} trials; a sweep has at most {MOST_TRIALS}"
            )
        self._check_names(given[0])
        return self

    def _check_names(self, kind: str) -> None:
        names = self.names
        if len(names) > MOST_PARAMETERS:
            raise problem_at((kind,), f"has {len(names)} parameters; at most {MOST_PARAMETERS}")
        for index, entry in enumerate(self.list):
            if entry.keys() != self.list[0].keys():
                raise problem_at(
                    ("list", index),
                    f"has the parameters {', '.join(sorted(entry)) or '(none)'}, and the first "
                    f"entry {', '.join(sorted(self.list[0])) or '(none)'}; give all the same",
                )
        if not names:
            raise problem_at((kind,), "has no parameters; give at least one")
        upper = [name.upper() for name in names]
        twice = next((name for name in names if upper.count(name.upper()) > 1), None)
        if twice is not None:
            raise problem_at(
                (kind,),
                f"has parameters that differ from '{twice}' in upper and lower case only; their "
                "environment variables would be the same",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self.grid or self.search or (self.list[0] if self.list else ()))

    @property
    def num_trials(self) -> int:
        """Number of trials of the whole sweep."""
        if self.search:
            return self.trials or 0
        return len(self.list) or math.prod(len(values) for values in self.grid.values())

    def fixed_trials(self) -> Iterator[dict[str, Any]]:
        """Yield the parameters of the trials of a grid or list; a search has none yet."""
        if self.list:
            yield from (dict(entry) for entry in self.list)
        elif self.grid:
            for values in product(*self.grid.values()):
                yield dict(zip(self.grid, values, strict=True))

    def most_unfinished(self, slots: int, slots_per_replica: int, min_replicas: int) -> int:
        """Return how many trials may be unfinished at the same time.

        Args:
            slots: of the cluster.
            slots_per_replica: of a trial.
            min_replicas: smallest number of replicas of a trial.
        """
        most = self.max_parallel
        if most is None:
            most = max(slots // (slots_per_replica * min_replicas), 1)
        if self.max_replicas is not None:
            most = min(most, max(self.max_replicas // min_replicas, 1))
        return most

    def better(self, value: float, other: float) -> bool:
        """Return whether a value of the metric is better than another one."""
        return value < other if self.direction == "minimize" else value > other


def fill_in(text: str, parameters: Parameters) -> str:
    """Return an argument with the values of its placeholders; ``{{`` and ``}}`` are braces.

    `KeyError`: a placeholder is not the name of a parameter.

    Example:
        >>> fill_in("--lr={lr}, {{lr}}", {"lr": 0.1})
        '--lr=0.1, {lr}'
    """

    def value(found: re.Match[str]) -> str:
        name = found[1]
        return found[0][0] if name is None else parameter_text(parameters[name])

    return _PLACEHOLDER.sub(value, text)


def check_placeholders(args: Sequence[str], names: Sequence[str]) -> None:
    """Raise an error about a placeholder in the arguments that is no parameter of a sweep."""
    known = dict.fromkeys(names, "")
    for index, text in enumerate(args):
        try:
            fill_in(text, known)
        except KeyError as error:
            name = error.args[0]
            raise problem_at(
                ("args", index),
                f"'{{{name}}}' is no parameter of the sweep, which has {', '.join(names)}; write "
                f"'{{{{{name}}}}}' for the text itself",
            ) from None


def trial_name(sweep: str, number: int) -> str:
    """Return the name of the job of a trial.

    Example:
        >>> trial_name("lr", 7)
        'lr-7'
    """
    return f"{sweep}-{number}"
