"""`layers.json`: what the layers of a model cost, as `LayerProfile.to_json_object` writes it."""

from __future__ import annotations

from pathlib import Path

from pipollux_perfmodel import LayerProfile
from pipollux_sched.utils.validation import spell_value

from .errors import ModelingError
from .files import decode, read_text


def read_layers(path: str | Path) -> LayerProfile:
    """Read the profile of a model's layers.

    Raises:
        ModelingError: naming the file, the key, its value and what is allowed.
    """
    text, name = read_text(path)
    try:
        data = decode(text)
        if not isinstance(data, dict):
            raise ValueError(
                f'{spell_value(data)} is not an object; it must begin with {{"version": 1'
            )
        return LayerProfile.from_json_object(data)
    except OverflowError:
        raise ModelingError(f"{name}: a number is too large; give finite numbers") from None
    except ValueError as error:
        raise ModelingError(f"{name}: {str(error).removeprefix('layer profile: ')}") from None
