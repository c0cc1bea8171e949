"""State in nested dicts, lists, tensors and numbers as one message, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .transport import Message


def packed(content: Mapping[str, Any]) -> Message:
    """Return a content as a message."""
    tensors: list[Tensor] = []

    def flat(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.clone())  # sent later, and changed in place
            return {"tensor": len(tensors) - 1}
        if isinstance(value, Mapping):
            return {"items": [[key, flat(x)] for key, x in value.items()]}
        return [flat(x) for x in value] if isinstance(value, (list, tuple)) else value

    return Message({"content": flat(content)}, tensors)


def unpacked(message: Message) -> Any:
    """Return the content of a :func:`packed` message."""

    def full(value: Any) -> Any:
        if isinstance(value, dict) and "tensor" in value:
            return message.tensors[value["tensor"]]
        if isinstance(value, dict):
            return {key: full(x) for key, x in value["items"]}
        return [full(x) for x in value] if isinstance(value, list) else value

    return full(message.header["content"])
