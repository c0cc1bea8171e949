"""A program that reads the state of NVIDIA's GPUs from the driver, for `probe_process`.

A call to the driver can block forever on a broken GPU, and then even SIGKILL does not end the
process. So this is a separate process, which the scheduler gives up. For each line on its standard
input, a JSON list with the indices of GPUs to leave out, it writes one line of JSON for each step:

    {"begin": 0}           the GPU with index 0 is read from now on
    {"gpu": {...}}         its state: see `_gpu`
    {"end": true}          that was all
    {"error": "...", "code": 9}    or: nothing can be read; an NVML error code, or `NO_PACKAGE`

The library is initialized for each reading only: a process that uses it keeps an administrator
from resetting a GPU. This file runs as a program, and imports nothing else, to start quickly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

GONE = (15, 16, 28, 999)
"""NVML's errors GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND and UNKNOWN, about the GPU itself. Other
ones mean that this GPU, driver or user lacks the answer."""
NO_PACKAGE = -1
_NO_PERMISSION = 4
_DOUBLE_BIT_CAUSES = (0, 1)
_UNCORRECTED, _VOLATILE = 1, 0
_RECOVERY_ACTION = 230
_MEMORY_V2 = 0x02000028


def main() -> None:
    """Answer until the end of the input."""
    try:
        import pynvml
    except ImportError as error:
        pynvml, missing = None, str(error)
    for line in sys.stdin:
        if pynvml is None:
            _write(error=f"the package nvidia-ml-py is missing ({missing})", code=NO_PACKAGE)
            continue
        try:
            _read(pynvml, set(json.loads(line)))
        except pynvml.NVMLError as error:
            _write(error=str(error), code=error.value)


def _read(nvml: Any, skipped: set[int]) -> None:
    nvml.nvmlInit()
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            if index in skipped:
                continue
            _write(begin=index)
            found = _gpu(nvml, index)
            if found is not None:
                _write(gpu=found)
    finally:
        nvml.nvmlShutdown()
    _write(end=True)


def _gpu(nvml: Any, index: int) -> dict[str, Any] | None:
    """Return the state of a GPU; None: it belongs to another user or container.

    Values that the GPU or driver does not know are null. `error` and `code` are those of a call
    that failed because of the GPU itself.
    """
    found: dict[str, Any] = {"index": index, "uuid": "", "name": "", "slices": []}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        found["uuid"] = nvml.nvmlDeviceGetUUID(handle)
        found["name"] = _ask(nvml, "nvmlDeviceGetName", handle) or ""
        mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
        found["mig"] = bool(mode and mode[0])
        found |= _use(nvml, handle)
        found |= _health(nvml, handle)
        if found["mig"]:
            found["slices"] = _slices(nvml, handle)
    except nvml.NVMLError as error:
        if error.value == _NO_PERMISSION:
            return None
        found |= {"error": str(error), "code": error.value}
    return found


def _use(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
    memory = memory or _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    rates = _ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", handle)
    return {
        "memory_used": None if memory is None else memory.used,
        "memory_total": None if memory is None else memory.total,
        "utilization": None if rates is None else rates.gpu,
        "processes": None if processes is None else sorted({one.pid for one in processes}),
    }


def _health(nvml: Any, handle: Any) -> dict[str, Any]:
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", handle)
    values = _ask(nvml, "nvmlDeviceGetFieldValues", handle, [_RECOVERY_ACTION])
    known = values is not None and values[0].nvmlReturn == 0
    pages = [_ask(nvml, "nvmlDeviceGetRetiredPages", handle, cause) for cause in _DOUBLE_BIT_CAUSES]
    counts = [len(each) for each in pages if each is not None]
    return {
        "ecc_errors": _ask(nvml, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        "retired_pages": sum(counts) if counts else None,
        "retirement_pending": _ask(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle),
        "remap_pending": None if rows is None else rows[2],
        "remap_failed": None if rows is None else rows[3],
        # Of the union's members; the value is an unsigned int.
        "recovery_action": values[0].value.uiVal if known else None,
    }


def _slices(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    found = []
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        mig = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuid = None if mig is None else _ask(nvml, "nvmlDeviceGetUUID", mig)
        if uuid is None:  # there are fewer slices than there could be
            continue
        found.append(
            {
                "uuid": uuid,
                "gpu_instance": _ask(nvml, "nvmlDeviceGetGpuInstanceId", mig),
                "compute_instance": _ask(nvml, "nvmlDeviceGetComputeInstanceId", mig),
                **_use(nvml, mig),
            }
        )
    return found


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """Return the result of a call; None if it is not known here. Errors of the GPU are raised."""
    function: Callable[..., Any] = getattr(nvml, name)
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in GONE:
            raise
        return None


def _write(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
