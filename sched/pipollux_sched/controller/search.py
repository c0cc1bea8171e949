"""Proposals and pruning of trials by Optuna.

Optuna keeps nothing: its study is made from the trials in the store whenever it is asked, in
memory. The sampler's random numbers depend on the seed of the sweep and the number of the trial, so
the same results lead to the same proposals, in whichever scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pipollux_sched.spec.sweep import SearchRange, SweepSpec
from pipollux_sched.store import Curve, TrialRecord, TrialState

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial


def why_no_optuna(spec: SweepSpec) -> str | None:
    """Explain why a sweep needs Optuna, which is not installed; None: all is well."""
    if not (spec.search or spec.pruner != "none") or find_spec("optuna") is not None:
        return None
    need = "a search" if spec.search else "a pruner"
    return (
        f"{need} needs Optuna; install it where the scheduler runs, with: "
        "pip install 'pipollux[sweep]'"
    )


class Search:
    """The study of one sweep, as far as its trials have come.

    Args:
        curves: values of the metric by trial and step.
    """

    def __init__(
        self,
        name: str,
        spec: SweepSpec,
        trials: Sequence[TrialRecord],
        curves: Mapping[int, Curve],
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spec = spec
        self._ranges = {key: _distribution(entry) for key, entry in spec.search.items()}
        self._study: Study = optuna.create_study(
            study_name=name,
            direction=spec.direction,
            sampler=_sampler(spec, 0),
            pruner=_pruner(spec),
        )
        self._study.add_trials(self._frozen(trial, curves.get(trial.number)) for trial in trials)

    def propose(self, count: int) -> list[dict[str, Any]]:
        """Return the parameters of the next trials."""
        proposals = []
        for _ in range(count):
            self._study.sampler = _sampler(self._spec, len(self._study.trials))
            proposals.append(dict(self._study.ask(self._ranges).params))
        return proposals

    def hopeless(self, numbers: Sequence[int]) -> tuple[list[int], dict[int, dict[str, Any]]]:
        """Return which of these trials are to be pruned, and the pruner's notes about all of them.

        Raises:
            IndexError: there is no such trial.
        """
        pruned = []
        for number in numbers:
            trial = self._study.get_trials(deepcopy=False)[number]
            if trial.intermediate_values and self._study.pruner.prune(self._study, trial):
                pruned.append(number)
        after = self._study.get_trials(deepcopy=False)
        return pruned, {number: dict(after[number].system_attrs) for number in numbers}

    def _frozen(self, trial: TrialRecord, curve: Curve | None) -> FrozenTrial:
        from optuna.trial import TrialState as State
        from optuna.trial import create_trial

        states = {
            TrialState.WAITING: State.RUNNING,  # Optuna would propose a waiting one again
            TrialState.UNFINISHED: State.RUNNING,
            TrialState.COMPLETE: State.FAIL if trial.value is None else State.COMPLETE,
            TrialState.PRUNED: State.PRUNED,
        }
        state = states.get(trial.state, State.FAIL)
        known = {name: trial.parameters[name] for name in self._ranges}
        return create_trial(
            state=state,
            value=trial.value if state is State.COMPLETE else None,
            params=known,
            distributions=self._ranges,
            system_attrs=dict(trial.attributes),
            intermediate_values={
                step: float("nan") if value is None else value
                for step, value in sorted((curve or {}).items())
            },
        )


def _distribution(entry: SearchRange) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if entry.choices:
        return CategoricalDistribution(entry.choices)
    low, high = entry.low or 0, entry.high or 0
    if entry.is_whole:
        return IntDistribution(int(low), int(high), log=entry.log, step=int(entry.step or 1))
    return FloatDistribution(float(low), float(high), log=entry.log, step=entry.step)


def _sampler(spec: SweepSpec, number: int) -> BaseSampler:
    from optuna.samplers import RandomSampler, TPESampler

    seed = (spec.seed + number) % 2**32
    if spec.sampler == "random":
        return RandomSampler(seed=seed)
    # Running trials count as bad ones, so that trials which run side by side differ.
    return TPESampler(seed=seed, constant_liar=True)


def _pruner(spec: SweepSpec) -> BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner

    match spec.pruner:
        case "median":
            return MedianPruner(n_warmup_steps=spec.warmup)
        case "halving":
            return SuccessiveHalvingPruner(min_resource=spec.warmup)
        case "hyperband":
            return HyperbandPruner(min_resource=spec.warmup)
        case "none":
            return NopPruner()
