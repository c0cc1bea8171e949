"""A process that sends notifications, confined by `guard`.

It answers JSON objects on standard input, one a line, with one on standard output each, and ends
when its input does. The first line has the allowed hosts.

    python -P -B -m pipollux_sched.notifications.worker
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any

import httpx

from pipollux_sched.notifications.guard import Guard
from pipollux_sched.notifications.hosts import HostRules

TIMEOUT = 10.0
"""Seconds to connect, and between two parts of an answer."""
_NO_APPRISE = (
    "Apprise is not installed where the scheduler runs; install it with: "
    "pip install 'pipollux[notify]'"
)


def main() -> None:
    """Answer requests until standard input ends."""
    logging.disable()  # the messages of libraries may hold URLs
    answers, sys.stdout = sys.stdout, sys.stderr
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    guard = Guard(HostRules.parse(json.loads(requests.get())["hosts"]))
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()  # of the system too, and those in SSL_CERT_FILE
    guard.install()
    with httpx.Client(verify=context, timeout=TIMEOUT, trust_env=False) as client:
        while True:
            request = json.loads(requests.get())
            guard.forget()
            answer = _answer(client, request)
            if "error" in answer and guard.refused is not None:
                answer = {"error": guard.refused, "final": True}
            elif "error" in answer and guard.withheld:
                answer["error"] += "; files and programs of the scheduler's host are not used"
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _read(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # in the middle of a notification, too


def _answer(client: httpx.Client, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "webhook" in request:
            return _post(client, request)
        return _apprise(request)
    except Exception as error:  # plugins are the code of others; their texts may hold secrets
        return {"error": f"{type(error).__name__}"}


def _post(client: httpx.Client, request: Mapping[str, Any]) -> dict[str, Any]:
    body = request["body"].encode()
    try:
        with client.stream(
            "POST", request["webhook"], content=body, headers=request["headers"]
        ) as response:
            status, pause = response.status_code, response.headers.get("Retry-After", "")
    except httpx.TimeoutException:
        return {"error": "no answer in time"}
    except httpx.ConnectError as error:
        tls = "CERTIFICATE" in str(error) or "SSL" in str(error)
        return {"error": "its certificate is not valid" if tls else "it cannot be reached"}
    except httpx.HTTPError as error:
        return {"error": f"the request failed ({type(error).__name__})"}
    if 200 <= status < 300:
        return {}
    answer: dict[str, Any] = {"error": f"it answers with status {status}", "final": status == 410}
    if pause.isdecimal():
        answer["retry_after"] = float(pause)
    return answer


def _apprise(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        from apprise import Apprise, AppriseAsset
    except ImportError:
        return {"error": _NO_APPRISE, "final": True}
    asset = AppriseAsset(app_id="Pipollux", app_desc="Pipollux", async_mode=False)
    service = Apprise.instantiate(request["apprise"], asset=asset, suppress_exceptions=True)
    if service is None:
        return {"error": "Apprise does not understand the URL", "final": True}
    if request.get("check"):
        return {}
    sent = service.notify(body=request["text"], title=request["title"])
    return {} if sent else {"error": "the service has not accepted it"}


if __name__ == "__main__":
    main()
