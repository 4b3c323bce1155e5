"""Ids that a client has chosen for a request, where an engine reads more than a name in them."""

from __future__ import annotations

import re

from pdserve.pd.errors import bad_request
from pdserve.pd.requests.request import ClientRequest

LONGEST_BYTES = 4096
"""Of an id in a body. vLLM's own are shorter than 50."""
_PLAIN = re.compile(r"[A-Za-z0-9._-]*")


def in_body(request: ClientRequest) -> str:
    """The body's `request_id`, which the Responses API takes for its request; empty: there is none. ApiError 400 for a
    long one: reading it would keep all other clients waiting. What is no string is not read: engines refuse it."""
    body = request.body
    if body.begins("request_id") != b'"':
        return ""
    if body.length("request_id") > LONGEST_BYTES:
        raise bad_request(f"request_id is longer than {LONGEST_BYTES} bytes.", "request_id")
    return str(body.get("request_id"))


def check_of_response(request: ClientRequest) -> None:
    """ApiError 400 for the id of a response that NIXL would misread: it stands in heartbeats as below, and first in the
    notification that decode has pulled, where `HB:` makes a heartbeat of it. Other APIs do not take it."""
    if request.dialect.name == "responses" and not _PLAIN.fullmatch(in_body(request)):
        raise bad_request("request_id may have letters, digits, dots, dashes and underscores only.", "request_id")


def without_commas(request_id: str) -> str:
    """Return an id without commas, for engines of NIXL. Decode's heartbeats are ids with commas between them
    (base_worker.py, `_send_heartbeats`): one with a comma in it extends no lease, and prefill's blocks may hold other
    prompts when decode pulls them."""
    return request_id.replace(",", "_")
