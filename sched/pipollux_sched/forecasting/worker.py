"""A process that makes forecasts, at low priority and on one core.

It answers JSON objects on standard input, one a line, with one on standard output each, and ends
when its input does: no forecast outlives the scheduler that asked for it.

    python -m pipollux_sched.forecasting.worker
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipollux_perfmodel.errors import PipolluxError
from pipollux_sched.forecasting.make import Forecaster
from pipollux_sched.spec.job import parse_job
from pipollux_sched.store import Store

_NICENESS = 19


def main() -> None:
    """Answer requests until standard input ends."""
    os.nice(_NICENESS)
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    first = json.loads(requests.get())
    where = first["store"]
    with Store(where if "://" in where else Path(where)) as store:
        forecaster = Forecaster(store)
        answered = 0.0
        request = first
        while True:
            answer = _answer(forecaster, request)
            used = time.process_time()
            answer["cpu_seconds"], answered = used - answered, used
            print(json.dumps(answer), flush=True)
            request = json.loads(requests.get())


def _read(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # in the middle of a forecast, too


def _answer(forecaster: Forecaster, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        new = [parse_job(spec) for spec in request.get("jobs", ())]
        found = forecaster.make(new)
    except PipolluxError as error:
        return {"error": str(error)}
    except Exception as error:  # policies are user code
        return {"error": f"a forecast failed: {error!r}"}
    return {"forecasts": found}


if __name__ == "__main__":
    main()
