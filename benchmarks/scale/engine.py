"""An engine that computes nothing and costs next to nothing, so that hundreds fit on one machine. Only the standard
library, and little of it: `python -S -E` starts it in a few milliseconds.

It listens after BENCH_READY_AFTER seconds (0), as an engine does that loads weights, and answers GET with 200 and a
completion with one token.
"""

import os
import select
import socket
import sys
import time

ONE_TOKEN = (
    b'{"choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
)


def argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def answer(request: bytes) -> bytes:
    body = ONE_TOKEN if request.startswith(b"POST") else b"{}"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


def whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return True


def main() -> None:
    time.sleep(float(os.environ.get("BENCH_READY_AFTER", "0")))
    server = socket.create_server((argument("--host"), int(argument("--port"))))
    waiting = {server: b""}
    while True:
        for ready in select.select(list(waiting), [], [])[0]:
            if ready is server:
                waiting[server.accept()[0]] = b""
                continue
            data = ready.recv(65536)
            waiting[ready] += data
            if not data:
                del waiting[ready]
                ready.close()
            elif whole(waiting[ready]):
                ready.sendall(answer(waiting[ready]))
                waiting[ready] = b""


if __name__ == "__main__":
    main()
