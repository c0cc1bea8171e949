"""What the command line asks a running scheduler, over HTTP."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

from pipollux_sched.errors import SchedulerError
from pipollux_sched.spec import JobSpec
from pipollux_sched.store import NodeCondition, StateDir

TIMEOUT = 30.0
"""Seconds to wait for an answer."""


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

    def cancel(self, name: str) -> dict[str, Any]:
        """Cancel a job; return it as the scheduler now knows it."""
        return dict(self._ask("DELETE", f"/jobs/{name}"))

    def suspend(self, name: str) -> dict[str, Any]:
        """Let a job save and hold nothing; return it as the scheduler now knows it."""
        return dict(self._ask("POST", f"/jobs/{name}/suspend"))

    def resume(self, name: str) -> dict[str, Any]:
        """Let a job be given room again; return it as the scheduler now knows it."""
        return dict(self._ask("POST", f"/jobs/{name}/resume"))

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes with their condition and free slots."""
        return list(self._ask("GET", "/nodes"))

    def set_node(self, name: str, condition: NodeCondition, reason: str = "") -> dict[str, Any]:
        """Let a node be ready, drain, or be dead; return it as the scheduler now knows it."""
        body = {"condition": condition.value, "reason": reason}
        return dict(self._ask("PUT", f"/nodes/{name}", json=body))

    def decide(self) -> None:
        """Let the allocator decide now, not only at the next interval."""
        self._ask("POST", "/decisions")

    def job(self, name: str) -> dict[str, Any]:
        """Return a job, with its launches and latest hints."""
        return dict(self._ask("GET", f"/jobs/{name}"))

    def cluster(self) -> dict[str, Any]:
        """Return the nodes with their free slots, and the policy."""
        return dict(self._ask("GET", "/cluster"))

    def _ask(self, method: str, path: str, **content: Any) -> Any:
        try:
            response = self._client.request(method, path, **content)
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
            raise self._nobody() from None
        except httpx.HTTPError as error:
            raise ClientError(
                f"the scheduler at {self._client.base_url} did not answer within {TIMEOUT:g} s "
                f"({error or type(error).__name__})"
            ) from error
        if response.is_success:
            return response.json()
        raise ClientError(_detail(response))

    def _nobody(self) -> ClientError:
        return ClientError(
            f"no scheduler serves {self._state_dir.path}; start one with: "
            f"pipollux serve --cluster FILE --state-dir {self._state_dir.path}"
        )


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the scheduler answered with status {response.status_code}"
