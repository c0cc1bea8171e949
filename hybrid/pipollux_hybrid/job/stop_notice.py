"""Reports to the scheduler that the replicas have saved and stop as requested.

The marker beside the checkpoint has the same information, but the agent reports it at its end, and
a cluster that kills a replica after its grace period kills the agent with it.
"""

from __future__ import annotations

import logging

from .env import JobEnvironment

LOG = logging.getLogger(__name__)
REQUEST_TIMEOUT = 2.0
"""Seconds that the end of the replicas waits for the scheduler; then the agent reports it."""


def tell_stop(env: JobEnvironment, step: int) -> None:
    """Report the step at which all replicas have stopped to the scheduler, from replica 0."""
    if not env.reports or env.attempt < 1 or not (env.scheduler_url and env.job_id):
        return
    # Importing httpx takes a third of a second, which scripts without a scheduler avoid.
    import httpx

    from pipollux_protocol.messages import Stop

    from .supervisor_client import supervisor_client

    body = Stop(attempt=env.attempt, step=step).to_json_object()
    try:
        with supervisor_client(env, timeout=REQUEST_TIMEOUT) as client:
            answer = client.post(f"{env.scheduler_url}/jobs/{env.job_id}/stops", json=body)
            answer.raise_for_status()
    except httpx.HTTPError as error:
        LOG.debug("reporting the stop at step %d to the scheduler failed: %s", step, error)
