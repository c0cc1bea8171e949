"""Settings that must be equal on all replicas, compared when the replicas join.

Replicas started with different arguments or environments would wait for each other until a timeout,
or mix up each other's tensors. So they compare a digest of the settings first, and gather the
settings themselves only if the digests differ, to report the differences.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.distributed_c10d import Store

from pipollux_hybrid.errors import ConfigurationError
from pipollux_protocol import environment as variables

from .control_plane import ControlPlane
from .env import JobEnvironment
from .layer_code import layer_settings

NAMED = 3
"""Number of differences that a message lists; one mistake often causes dozens."""
READ_SECONDS = 10.0
"""Seconds that the process with the store waits for others to read why they cannot begin."""
_agreements = itertools.count()
"""Numbers of the comparisons by a store, which may be that of earlier groups."""


def agree(control: ControlPlane, where: str, settings: Mapping[str, object]) -> None:
    """Compare settings from ``where`` between the replicas; all of them call it at the same point.

    Raises:
        ConfigurationError: They differ; with the differences and their ranks, on every replica.
        SynchronizationError: A replica is gone.
    """
    texts = _texts(settings)
    content = json.dumps([where, texts]).encode()
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)
    control.settings |= texts
    if control.group is None:
        return
    if len({int(x) for x in control.gather(torch.tensor([digest]))}) == 1:
        return
    answers = [json.loads(answer) for answer in control.gather_bytes(content)]
    places = [place for place, _ in answers]
    if len(set(places)) > 1:
        raise ConfigurationError(
            f"replicas are at different places of the script, {by_value(places)}: every replica "
            "must run the same script and make the same things in the same order"
        )
    raise ConfigurationError(_refusal(where, [texts for _, texts in answers]))


def agree_by_store(
    store: Store, rank: int, size: int, where: str, settings: Mapping[str, object]
) -> None:
    """Compare settings as :func:`agree` does, before the processes have a group. Raises a
    ConfigurationError on every process if they differ.
    """
    prefix = f"pipollux-{next(_agreements)}"
    keys = [f"{prefix}-settings-{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(_texts(settings)))
    if rank == 0:
        everyone = [json.loads(store.get(key)) for key in keys]
        alike = all(texts == everyone[0] for texts in everyone)
        store.set(f"{prefix}-refusal", "" if alike else _refusal(where, everyone))
    refusal = store.get(f"{prefix}-refusal").decode()
    if not refusal:
        return
    read = [f"{prefix}-read-{other}" for other in range(size)]
    store.set(read[rank], "1")
    if rank == 0:  # the store may end with this process
        with suppress(RuntimeError):
            store.wait(read, timedelta(seconds=READ_SECONDS))
    raise ConfigurationError(refusal)


def by_value(values: Sequence[object], word: str = "replica") -> str:
    """Return which replicas have which value; the values are in the order of ranks.

    Example:
        >>> by_value(["2", "3", "2"])
        '2 on replicas 0, 2, and 3 on replica 1'
    """
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", and ".join(
        f"{value} on {word}{'s' if len(where) > 1 else ''} {', '.join(map(str, where))}"
        for value, where in ranks.items()
    )


def differences_of_joining(theirs: Mapping[str, str | None], ours: Mapping[str, str | None]) -> str:
    """Return the first few differences between a joining replica and the job.

    Example:
        >>> differences_of_joining({"lr": "0.1", "wd": None}, {"lr": "0.2", "wd": None})
        'lr is 0.1 in the job and 0.2 here'
    """
    names = dict.fromkeys([*theirs, *ours])
    pairs = {name: (_value(theirs, name), _value(ours, name)) for name in names}
    found = [
        f"{name} is {there} in the job and {here} here"
        for name, (there, here) in pairs.items()
        if there != here
    ]
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(found[:NAMED]) + more


def environment_settings(env: JobEnvironment) -> dict[str, object]:
    """Return the environment variables that must be equal on every replica, by name."""
    return {
        # Nodes may mount the same storage at different paths; its identity is checked later.
        variables.CHECKPOINT_DIR.name: "set" if env.checkpoint_dir else None,
        variables.NUM_STAGES.name: env.num_stages,
        variables.CHECK_REPLICAS.name: env.check_replicas or None,
        variables.JOB_ID.name: env.job_id,
        variables.ATTEMPT.name: env.attempt or None,
        variables.TIMEOUT.name: env.timeout,
        variables.HOST_TIMEOUT.name: env.host_timeout,
        # Under a scheduler it concerns the processes of one replica only, and the scheduler may
        # have restarted with another value since the other replicas were launched.
        variables.FROZEN_TIMEOUT.name: None if env.attempt else env.frozen_timeout,
    }


def model_settings(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    arguments: Mapping[str, object],
) -> dict[str, object]:
    """Return HybridParallel's arguments that all replicas must share; of objects, their class."""
    settings: dict[str, object] = {name: _word(value) for name, value in arguments.items()}
    settings["optimizer"] = type(optimizer).__name__
    for name, layer in module.named_children():
        settings[f"layer {name!r}"] = type(layer).__name__
    groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name, parameter in module.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        group = f"in group {groups[parameter]}" if parameter in groups else "in no group"
        settings[f"parameter {name!r}"] = f"{_shape(parameter)}, {kind}, {group} of the optimizer"
    for name, buffer in module.named_buffers():
        settings[f"buffer {name!r}"] = _shape(buffer)
    settings |= layer_settings(module)
    for index, options in enumerate(optimizer.param_groups):
        for name, value in options.items():
            if name != "params":
                settings[f"{name} of the optimizer's group {index}"] = _word(value)
    return settings


def _word(value: object) -> object:
    """Return a comparable form of a value: the class of an object, whose repr holds its address."""
    if isinstance(value, (list, tuple)):
        return [_word(x) for x in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    plain = isinstance(value, (int, float, str, torch.dtype)) or value is None
    return value if plain else type(value).__name__


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _texts(settings: Mapping[str, object]) -> dict[str, str | None]:
    return {name: None if value is None else str(value) for name, value in settings.items()}


def _refusal(where: str, everyone: Sequence[Mapping[str, str | None]]) -> str:
    differences = _differences(everyone)
    more = f"; and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
    return (
        f"replicas differ in {where}: {'; '.join(differences[:NAMED])}{more}: start every replica "
        "with the same script, arguments and environment"
    )


def _differences(everyone: Sequence[Mapping[str, str | None]]) -> list[str]:
    names = dict.fromkeys(name for texts in everyone for name in texts)
    values = {name: [_value(texts, name) for texts in everyone] for name in names}
    return [f"{name} is {by_value(found)}" for name, found in values.items() if len(set(found)) > 1]


def _value(texts: Mapping[str, str | None], name: str) -> str:
    if name not in texts:
        return "missing"
    text = texts[name]
    return "not set" if text is None else text
