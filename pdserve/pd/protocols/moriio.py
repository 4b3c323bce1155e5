"""vLLM's MoRIIOConnector in READ mode: decode reads the KV of a prompt from prefill, and learns its place from
prefill's answer.

The contract is that of kv_connector/v1/moriio in vLLM 0.32. Two stages, one after the other, as over NIXL, with these
differences:

- Prefill is asked with a `transfer_id` that both sides know the transfer by; a new one in every attempt.
- Prefill's answer has all that decode needs, its address and ports too (`request_finished`), and goes into the decode
  leg byte for byte. So nothing is registered with this proxy, and no address is put into a request id.
- Decode looks for an address in the request id first (`get_peer_zmq_from_request_id`), before it reads the parameters.
  A client chooses that id, by its header, or by the body of a response (`/v1/responses`), and would send decode to a
  host of its choice: ids with the marks of an address are refused.
- A prefill that ends by stop keeps nothing, and its answer has no parameters. Decode computes the prompt then: by the
  patch moriio-unread-prompts, without which it would answer from blocks that nobody wrote.
- What prefill keeps it keeps for `defer_timeout`, and no heartbeat extends that. A recipe's is longer than a request
  may last (recipe/rules/connectors.py); here the limit of a request is the lease, of which the first half counts.
- Kept blocks are freed by a decode that has taken the request in: after its read, or, when the request is aborted
  before it has blocks, by a release without one.

WRITE mode is not spoken. Decode's request would wait there without an end for a prefill that has died, and one that is
aborted while it waits would keep its blocks for ever: `request_finished` forgets the transfer id by which the end of
the WRITE is recognised.
"""

from __future__ import annotations

from typing import Final

from pdserve.pd.errors import ApiError
from pdserve.pd.protocols import chosen_ids
from pdserve.pd.protocols.nixl import NixlProtocol
from pdserve.pd.random_id import new_id
from pdserve.pd.requests.request import ClientRequest

_ASK: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"transfer_id":"tx-%b"}'
)
_MARKS: Final = ("___prefill_addr_", "___decode_addr_")
"""_PREFILL_ZMQ_RE and _DECODE_ZMQ_RE of moriio_common.py."""


class MoriioProtocol(NixlProtocol):
    """The protocol object of one proxy. `lease_seconds` is the limit of a request."""

    def _fit_id(self, request: ClientRequest) -> None:
        """ApiError 400 for an id that names an address."""
        for given in (request.request_id, chosen_ids.in_body(request)):
            if any(mark in given for mark in _MARKS):
                raise ApiError(400, "a request id must not name the address of an engine", param="request_id")

    def _asked(self) -> bytes:
        return ask()


def ask() -> bytes:
    """The kv_transfer_params of one prefill leg."""
    return _ASK % new_id().encode()
