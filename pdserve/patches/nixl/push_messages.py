"""What the two workers of a push tell each other beyond vLLM's own words, as NIXL notifications.

decode -> prefill, `withdraw`: write nothing for this request any more, and say when that holds. prefill -> decode,
`clear`: no WRITE of it is under way, and none will begin. A worker without the patch logs either as a notification of a
request that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

PREFIX = b"PDSERVE_PUSH:"
_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)


def base_of(request_id: str) -> str:
    """The id without what each engine adds: both legs of a request have it. As upstream's get_base_request_id."""
    return _SUFFIX.sub("", request_id)


@dataclass(frozen=True)
class PushPeer:
    """An engine, as vLLM's handshake asks for it."""

    engine: str
    host: str
    port: int
    tp: int
    pp: int = 1

    @classmethod
    def prefill_of(cls, registration: Mapping[str, Any]) -> PushPeer:
        """Who is asked to write, of a registration. KeyError, TypeError, ValueError: it does not say."""
        return cls(
            str(registration["remote_engine_id"]),
            str(registration["remote_host"]),
            int(registration["remote_port"]),
            int(registration["remote_tp_size"]),
            int(registration.get("remote_pp_size") or 1),
        )

    @classmethod
    def decode_of(cls, registration: Mapping[str, Any]) -> PushPeer:
        """Who asks, of the same."""
        return cls(
            str(registration["decode_engine_id"]),
            str(registration["decode_host"]),
            int(registration["decode_port"]),
            int(registration["decode_tp_size"]),
        )


@dataclass(frozen=True)
class PushWord:
    """One of them."""

    what: Literal["withdraw", "clear"]
    request_id: str
    """Decode's own."""
    sender: PushPeer
    rank: int
    """Of the sender within its engine."""

    def encode(self) -> bytes:
        return PREFIX + json.dumps(asdict(self)).encode()


def decode(notification: bytes) -> PushWord | None:
    """None: it is none of ours, or one that this version does not understand."""
    if not notification.startswith(PREFIX):
        return None
    try:
        fields = json.loads(notification[len(PREFIX) :])
        sender = PushPeer(**fields["sender"])
        if fields["what"] not in ("withdraw", "clear"):
            return None
        return PushWord(fields["what"], str(fields["request_id"]), sender, int(fields["rank"]))
    except (ValueError, TypeError, KeyError):
        return None
