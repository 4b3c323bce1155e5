"""The two requests of one attempt over Mooncake."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.pd.protocols import prefill_leg
from pdserve.pd.protocols.transfer import Transfer
from pdserve.pd.relay.leg import Leg
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.registry import Worker


class Legs:
    """One of a transfer's two requests each."""

    __slots__ = ("decode", "prefill")

    def __init__(self, prefill: Leg, decode: Leg) -> None:
        self.prefill, self.decode = prefill, decode

    def close(self) -> None:
        """Decode first: it notifies prefill that it will not fetch the KV."""
        self.decode.close()
        self.prefill.close()


def send(
    engines: Engines, request: ClientRequest, transfer: Transfer, decode: Worker, poke: Callable[[], None]
) -> Legs:
    """Sends both. The transfer's slot at its prefill is free again when that leg is complete."""
    dialect, body = request.dialect, request.body
    prefill_body = dialect.prefill_body(body, transfer.for_prefill())
    decode_body = dialect.decode_body(body, transfer.for_decode())
    prefill = prefill_leg.send(
        engines,
        request,
        transfer.prefill,
        prefill_body,
        rank_header=transfer.rank_header(),
        poke=poke,
        on_complete=transfer.prefill.slots.give,
    )
    head = engines.post(decode, request.target, request.headers, decode_body)
    return Legs(prefill, Leg(decode, head, decode_body, poke))
