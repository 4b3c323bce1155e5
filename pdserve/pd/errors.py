"""Define the errors of one request, in OpenAI's JSON shape. Nothing here names an internal address.

ApiError         answered to the client with its status NoWorkerError    one of them: no engine of a role may be used
ClientGoneError  the client has left: there is no answer
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

_NO_ROUTE = b'{"detail":"Not Found"}'
"""Starlette's answer, which vLLM has no handler for: which routes there are depends on the model's tasks."""


_LONGEST_PATH = 256


class ApiError(Exception):
    """An error for the client. The fields are vLLM's (and so OpenAI's): message, type, param, code."""

    def __init__(
        self, status: int, message: str, *, type_: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_ or _type_of(status)
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after)} if self.retry_after else {}


class NoWorkerError(ApiError):
    """Says that no engine of a role may be used, and that none was asked."""


class ClientGoneError(Exception):
    """The client closed its connection."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def no_route(path: str) -> ApiError:
    """Return the error for a path that nothing here or at the engines answers."""
    return ApiError(404, f"Not Found: this proxy has no route {path[:_LONGEST_PATH]}")


def from_upstream(worker: str, status: int, body: bytes, key_of_client: bool = False) -> ApiError:
    """Return the engine's own error with its status; what is not meant for clients becomes a 502. `key_of_client`: it
    was the client's own key that the engine judged."""
    if status in (401, 403) and key_of_client:
        return ApiError(status, "The engine does not accept this API key.")
    if status in (401, 403):
        return ApiError(502, f"{worker} refused the deployment's engine key")
    if status < 400:
        return ApiError(502, f"{worker} gave an unexpected answer (HTTP {status})")
    error = _error_field(body)
    if error is None:
        if status == 404 and body == _NO_ROUTE:
            return ApiError(404, "The engine does not offer this route for its model.")
        return ApiError(status, f"{worker} failed (HTTP {status})")
    type_, param = error.get("type"), error.get("param")
    return ApiError(
        status,
        str(error.get("message") or f"{worker} failed (HTTP {status})"),
        type_=type_ if isinstance(type_, str) else None,
        param=param if isinstance(param, str) else None,
    )


def from_event(worker: str, data: bytes) -> ApiError | None:
    """Return the error in the first event of a stream: vLLM answers 200 before it knows that the KV did not arrive."""
    error = _error_field(data)
    if error is None:
        return None
    code = error.get("code")
    return from_upstream(worker, code if isinstance(code, int) and 400 <= code <= 599 else 500, data)


def _error_field(body: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else None


def _type_of(status: int) -> str:
    phrase = HTTPStatus(status).phrase.title().replace(" ", "") if status in HTTPStatus._value2member_map_ else "Http"
    return phrase if phrase.endswith("Error") else f"{phrase}Error"
