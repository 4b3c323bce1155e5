"""The message by which decode withdraws pulls, over MooncakeConnector's own side channel.

One frame from a DEALER to the ROUTER of a prefill worker, like a pull, but of a text that no msgpack decoder accepts:
a peer without the patch answers it with status ERROR, as it answers whatever it cannot decode, and nothing else
happens. A peer with it answers FINISH with the requests in ok_reqs, when it is certain that their blocks are not
written any more: not started and never will be, or ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PREFIX = b"pdserve withdraws "


@dataclass(frozen=True)
class Withdrawal:
    """Decode does not want these any more."""

    transfers: Mapping[str, str]
    """Decode's request id -> transfer id."""

    def encode(self) -> bytes:
        return _PREFIX + json.dumps(dict(self.transfers)).encode()


class SideChannelDecoder:
    """Stands before upstream's decoder of pulls in a prefill worker."""

    def __init__(self, pulls: Any) -> None:
        self._pulls = pulls

    def decode(self, message: bytes) -> Any:
        """A Withdrawal, or what upstream makes of the message. Raises ValueError like upstream's decoder."""
        if bytes(message[: len(_PREFIX)]) != _PREFIX:
            return self._pulls.decode(message)
        transfers = json.loads(bytes(message[len(_PREFIX) :]))
        return Withdrawal({str(request): str(transfer) for request, transfer in transfers.items()})
