"""What the command line asks a running scheduler, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from pipollux_sched.errors import SchedulerError
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import NodeCondition, StateDir

TIMEOUT = 30.0
"""Seconds to wait for an answer."""

DELETE_TIMEOUT = 600.0
"""Seconds to wait until a job is deleted, whose checkpoints may be large."""


class ClientError(SchedulerError):
    """The scheduler cannot be asked, or refuses; the text is one sentence for the user."""


class Client:
    """Asks the scheduler that serves a state directory.

    Example:
        >>> with Client(StateDir.choose()) as client:
        ...     client.cancel("char-lm")

    Args:
        state_dir: its ``server.json`` says where the scheduler listens, and holds the admin token.

    Raises:
        ClientError: no scheduler serves the directory.
    """

    def __init__(self, state_dir: StateDir) -> None:
        self._state_dir = state_dir
        info = state_dir.read_server()
        if info is None:
            raise self._nobody()
        self._client = httpx.Client(
            base_url=info.url,
            headers={"Authorization": f"Bearer {info.token}"},
            timeout=TIMEOUT,
            trust_env=False,  # a proxy has no business with the loopback interface
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, spec: JobSpec) -> dict[str, Any]:
        """Submit a job; return it as the scheduler now knows it."""
        return dict(self._ask("POST", "/jobs", json=spec.model_dump(mode="json")))

    def submit_all(self, specs: Sequence[JobSpec]) -> list[dict[str, Any]]:
        """Submit jobs, all or none of them; return them as the scheduler now knows them."""
        # Without what it knows anyway: so a thousand jobs fit into one request.
        jobs = [spec.model_dump(mode="json", exclude_defaults=True) for spec in specs]
        return list(self._ask("POST", "/jobs/batch", json={"jobs": jobs}))

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, in the order they came."""
        return list(self._ask("GET", "/jobs"))

    def cancel(self, name: str) -> dict[str, Any]:
        """Cancel a job; return it as the scheduler now knows it."""
        return dict(self._ask("DELETE", f"/jobs/{name}"))

    def suspend(self, name: str) -> dict[str, Any]:
        """Suspend a job; return it as the scheduler now knows it."""
        return dict(self._ask("POST", f"/jobs/{name}/suspend"))

    def resume(self, name: str) -> dict[str, Any]:
        """Let a suspended job go on; return it as the scheduler now knows it."""
        return dict(self._ask("POST", f"/jobs/{name}/resume"))

    def rerun(self, name: str, *, from_scratch: bool = False) -> dict[str, Any]:
        """Run a job again that has ended; return it as the scheduler now knows it.

        Args:
            name: of the job.
            from_scratch: whether it begins anew; else it goes on from its last checkpoint.
        """
        query = {"from_scratch": from_scratch}
        return dict(self._ask("POST", f"/jobs/{name}/rerun", params=query))

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a job that has ended; return how it had ended, and what is left of it."""
        return dict(self._ask("POST", f"/jobs/{name}/delete", timeout=DELETE_TIMEOUT))

    def job(self, name: str, points: int = 0) -> dict[str, Any]:
        """Return a job, with its generations and latest hints.

        Args:
            name: of the job.
            points: points at most of each of its curves, up to 500.
        """
        return dict(self._ask("GET", f"/jobs/{name}", params={"points": points}))

    def logs(self, name: str, tail: int = 100) -> list[dict[str, Any]]:
        """Return the last lines of each replica of each generation of a job."""
        return list(self._ask("GET", f"/jobs/{name}/logs", params={"tail": tail}))

    def replicas(self, name: str, generation: int, wait: float = 0.0) -> dict[str, Any]:
        """Return where the replicas of a job are, after waiting up to `wait` seconds for all."""
        query = {"generation": generation, "wait": wait}
        return dict(
            self._ask("GET", f"/jobs/{name}/replicas", params=query, timeout=TIMEOUT + wait)
        )

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes, each with its condition and the replicas that are there."""
        return list(self._ask("GET", "/nodes"))

    def set_node(self, name: str, condition: NodeCondition, reason: str = "") -> dict[str, Any]:
        """Let a node be ready, drain, or be dead; return it as the scheduler now knows it."""
        body = {"condition": condition.value, "reason": reason}
        return dict(self._ask("PUT", f"/nodes/{name}", json=body))

    def decide(self) -> None:
        """Let the allocator decide now, not only at the next interval."""
        self._ask("POST", "/decisions")

    def events(
        self, after: int = 0, *, job: str | None = None, limit: int = 1000
    ) -> list[dict[str, Any]]:
        """Return the events of ids above `after`, the oldest first."""
        query = {"after": after, "limit": limit, **({} if job is None else {"job": job})}
        return list(self._ask("GET", "/events", params=query))

    def follow(
        self, after: int | None = None, *, job: str | None = None
    ) -> Generator[dict[str, Any]]:
        """Yield events as they happen, until the scheduler ends.

        Args:
            after: begin with the first event of a larger id; None: with the next that happens.
            job: only events of this job.

        Raises:
            ClientError: the scheduler refuses, or has been silent for too long.
        """
        query = {key: value for key, value in (("after", after), ("job", job)) if value is not None}
        with (
            self._answers(),
            self._client.stream("GET", "/events/stream", params=query, timeout=TIMEOUT) as response,
        ):
            if not response.is_success:
                response.read()
                raise ClientError(_detail(response))
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield dict(json.loads(line.removeprefix("data: ")))

    def metrics(self) -> str:
        """Return the figures for Prometheus, in its text format."""
        return self._request("GET", "/metrics").text

    def cluster(self) -> dict[str, Any]:
        """Return the nodes with their free slots, and the policy."""
        return dict(self._ask("GET", "/cluster"))

    def _ask(self, method: str, path: str, **content: Any) -> Any:
        return self._request(method, path, **content).json()

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        with self._answers():
            response = self._client.request(method, path, **content)
        if not response.is_success:
            raise ClientError(_detail(response))
        return response

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Say in a sentence that the scheduler does not answer, where it does not."""
        try:
            yield
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
            raise self._nobody() from None
        except httpx.HTTPError as error:
            raise ClientError(
                f"the scheduler at {self._client.base_url} did not answer within {TIMEOUT:g} s "
                f"({error or type(error).__name__})"
            ) from error

    def _nobody(self) -> ClientError:
        return ClientError(
            f"no scheduler serves {self._state_dir.path}; start one with: "
            f"pipollux serve --state-dir {self._state_dir.path}"
        )


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the scheduler answered with status {response.status_code}"
