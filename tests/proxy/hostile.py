"""What clients that mean harm have in common: pieces of requests and answers."""

from __future__ import annotations

from tests.proxy.raw import head

PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "hi"}'
STREAM_HEAD = head("text/event-stream")
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
METRICS = b"GET /metrics HTTP/1.1\r\nhost: proxy\r\n\r\n"
MEGABYTE = 1 << 20
