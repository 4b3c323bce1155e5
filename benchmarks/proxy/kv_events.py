"""What a prefill says of its KV cache, for the system that routes by it: vLLM's KV events over ZMQ."""

from __future__ import annotations

import struct
from hashlib import sha256

import msgspec
import zmq

BLOCK_TOKENS = 16


class Publisher:
    """Of one prefill. Publishes a prompt when it hears of it for the first time."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._sequence = 0
        self._stored: dict[bytes, list[object]] = {}

    def stored(self, tokens: list[int]) -> None:
        """These are in the cache from now on, as far as they fill blocks."""
        parent: bytes | None = None
        fresh: list[list[object]] = []
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            name = sha256((parent or b"") + bytes(block)).digest()
            if name not in self._stored:
                event = ["BlockStored", [name], parent, block, BLOCK_TOKENS, None, "GPU", None]
                self._stored[name] = event
                fresh.append(event)
            parent = name
        self._publish(fresh)

    def again(self) -> None:
        """For a proxy that came later: everything once more."""
        self._publish(list(self._stored.values()))

    def _publish(self, events: list[list[object]]) -> None:
        if events:
            batch = msgspec.msgpack.encode([0.0, events, 0])
            self._socket.send_multipart((b"", struct.pack(">Q", self._sequence), batch), zmq.NOBLOCK)
            self._sequence += 1
