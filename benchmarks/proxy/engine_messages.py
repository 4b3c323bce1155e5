"""What the mock engines say, and what they read of a request."""

from __future__ import annotations

import json

import msgspec

from benchmarks.proxy.wire import MODEL, PAIRS, STAMP, STAMP_DIGITS

METRICS = "".join(
    f'# TYPE vllm:{name} gauge\nvllm:{name}{{engine="0",model_name="{MODEL}"}} {value}\n'
    for name, value in (("num_requests_running", 0.0), ("num_requests_waiting", 0.0), ("kv_cache_usage_perc", 0.1))
).encode()
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "logprobs": None,
                     "finish_reason": "length"}],
        "usage": {"prompt_tokens": 128, "completion_tokens": 1, "total_tokens": 129},
    }
).encode()  # fmt: skip
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]}).encode()
ENGINE_IDS = [f"0d0c3a52-5a3e-4b7c-9f0e-1b1b2a2c3d{number:02x}" for number in range(PAIRS)]
QUERIES = [
    json.dumps({"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}).encode()
    for engine_id in ENGINE_IDS
]
BEFORE, AFTER = (
    b'data: {"id":"chatcmpl-7d4cf2f0a6b54c3f9a3b","object":"chat.completion.chunk","created":1767225600,'
    b'"model":"bench","choices":[{"index":0,"delta":{"content":"' + STAMP,
    b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
)
SIZE = len(BEFORE) + STAMP_DIGITS + len(AFTER)
FRAME_BEFORE, FRAME_AFTER = b"%x\r\n" % SIZE + BEFORE, AFTER + b"\r\n"
LAST = b"data: [DONE]\n\n"
END = b"%x\r\n%s\r\n0\r\n\r\n" % (len(LAST), LAST)
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Settings(msgspec.Struct):
    """How the engines behave. Times in seconds."""

    prefill: float = 0.0
    admission: float = 0.0
    """What decode needs of its own (tokenising, queueing, allocating) before it could make its first token."""
    interval: float = 0.02
    """Between two steps; every running stream gets one chunk a step. 0: as fast as the sockets take them."""
    chunks: int = 4
    """Of a stream; 0: until /mock/finish."""
    hold: bool = False
    """Streams wait after their first chunk for /mock/go, so that no load builds up while others still begin."""


class Transfer(msgspec.Struct):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: str | None = None
    remote_engine_id: str | None = None


class Body(msgspec.Struct):
    stream: bool = False
    max_tokens: int | None = None
    kv_transfer_params: Transfer | None = None


DECODER = msgspec.json.Decoder(Body)
