"""Amounts of resources: "500m" of a CPU, "16Gi" of memory, "2" GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .answers import Object

_FACTORS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def amount(text: str | int | float) -> float:
    """Return a quantity as a number."""
    digits = str(text).rstrip("mkMGTKi")
    return float(digits) * _FACTORS[str(text)[len(digits) :]]


def total(things: Iterable[Mapping[str, str | int | float]]) -> dict[str, float]:
    """Return the sum of amounts, by resource."""
    summed: dict[str, float] = {}
    for thing in things:
        for name, text in thing.items():
            summed[name] = summed.get(name, 0.0) + amount(text)
    return summed


def requested(pod: Object) -> dict[str, float]:
    """Return what a pod asks for; each pod takes one of the resource "pods"."""
    asked = (x.get("resources", {}).get("requests", {}) for x in pod["spec"]["containers"])
    return {"pods": 1.0, **total(asked)}
