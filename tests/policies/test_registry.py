"""Policies and their options as text, and the one definition of options."""

from typing import Any

import pytest

from pipollux_policies import (
    POLICIES,
    CompletionTime,
    ExactPolicy,
    FairSpeedup,
    FifoPolicy,
    PolluxPolicy,
    SiaPolicy,
    TiresiasPolicy,
    make_policy,
    parse_policy,
    policy_help,
    policy_text,
    split_policies,
)
from pipollux_policies.options import show


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("fifo", "fifo", {}),
        ("fifo:backfill=true", "fifo", {"backfill": True}),
        ("exact:rank_power=0,fairness=1.25", "exact", {"rank_power": 0.0, "fairness": 1.25}),
        (" exact : tail = none ", "exact", {"tail": None}),
        ("tiresias:queue_thresholds=600/6000.5,promotion=2", "tiresias", None),
        ("pollux:population=20,power=-2", "pollux", {"population": 20, "power": -2.0}),
    ],
)
def test_options_have_the_types_of_the_constructor(
    text: str, name: str, options: dict[str, Any] | None
) -> None:
    if options is None:
        options = {"queue_thresholds": (600.0, 6000.5), "promotion": 2.0}
    assert parse_policy(text) == (name, options)
    assert [type(value) for value in parse_policy(text)[1].values()] == [
        type(value) for value in options.values()
    ]
    assert parse_policy(policy_text(name, options)) == (name, options)


def test_options_of_an_objective_have_the_types_of_its_constructor() -> None:
    given: dict[str, Any] = {"rank_power": "0.5", "horizon": 300}
    found = CompletionTime(**given)
    assert (found.rank_power, found.horizon) == (0.5, 300.0)
    assert [type(value) for value in found.options.values()] == [float] * len(found.options)


@pytest.mark.parametrize("name", POLICIES)
def test_every_default_and_example_is_allowed_and_described(name: str) -> None:
    told = policy_help()
    assert f"\n  {name}" in told
    for option in POLICIES[name].options.values():
        assert option.parse(show(option.default)) == option.default
        given = {} if option.example == option.default else {option.name: option.example}
        policy: Any = make_policy(f"{name}:{option.name}={show(option.example)}")
        assert getattr(policy, "options", {}) == given
        assert option.meaning
        assert f"    {option.name}: {option.allowed}; default {show(option.default)}\n" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exakt", "'exakt' is not known; did you mean exact? choose from exact, pollux, sia, "),
        ("exact:rank_power=2", "rank_power must be a number between 0 and 1; write, for example, "),
        ("exact:rank_power=2", "exact:rank_power=0.28"),
        ("exact:tail=11", "tail must be a number between 0 and 10, or none; "),
        ("exact:fairness=0.9", "fairness must be a finite number at least 1, or none; "),
        ("exact:scarcity=nan", "scarcity must be a finite number at least 0; "),
        ("exact:rank_power=none", "rank_power must be a number between 0 and 1; "),
        ("exact:rank_pwer=1", "exact has no option 'rank_pwer'; did you mean rank_power? it has "),
        ("exact:tail=1,tail=2", "tail is given twice; leave one of them out"),
        ("exact:", "exact has no option ''"),
        ("sia:tail=1", "sia has no option 'tail'; it has power, waiting_cost, "),
        ("sia:power", "power must be a number below 0; write, for example, sia:power=-0.5"),
        ("sia:relative_gap=1", "relative_gap must be a number at least 0 and below 1; "),
        ("optimus:tail=1", "optimus has no options; write optimus"),
        ("pollux:power=0", "power must be a number other than 0; "),
        ("pollux:population=0.5", "population must be a whole number at least 1; "),
        ("pollux:seed=1", "pollux has no option 'seed'; it has population, "),
        ("fifo:backfill=3", "backfill must be true or false; "),
        ("tiresias:queue_thresholds=5/5", "queue_thresholds must be rising numbers above 0, "),
    ],
)
def test_an_invalid_policy_is_refused_with_the_fix(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"policy: ") as refused:
        parse_policy(text)
    assert words in str(refused.value)


def test_a_list_of_policies_keeps_the_options_of_each() -> None:
    listed = ["exact:rank_power=0.5,tail=1", "fifo", "sia:power=-1", "exact"]
    assert split_policies(", ".join(listed)) == listed


def test_options_are_added_to_those_of_the_text() -> None:
    made: Any = make_policy("exact:tail=1", fairness=1.25)
    assert made.options == {"tail": 1.0, "fairness": 1.25}
    with pytest.raises(ValueError, match=r"sia has no option 'fairness'"):
        make_policy("sia", fairness=1.25)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (ExactPolicy(CompletionTime(fairness=1.25, scarcity=0.7)), {"fairness": 1.25}),
        (ExactPolicy(FairSpeedup()), {}),
        (PolluxPolicy(seed=3, generations=5, population=100), {"generations": 5}),
        (SiaPolicy(), {}),
        (TiresiasPolicy(queue_thresholds=(1, 2)), {"queue_thresholds": (1.0, 2.0)}),
        (FifoPolicy(backfill=True), {"backfill": True}),
    ],
)
def test_a_policy_knows_the_options_that_differ_from_the_default(
    policy: Any, options: dict[str, Any]
) -> None:
    assert policy.options == options
