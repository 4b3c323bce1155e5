"""A model hub: one repository, one commit, the requests that huggingface_hub makes to list and download it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_SHARDS = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
FILES: dict[str, bytes] = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors.index.json": json.dumps({"weight_map": _SHARDS}).encode(),
    "model-1.safetensors": b"1" * 100_000,
    "model-2.safetensors": b"2" * 200_000,
    "stray.safetensors": b"3",
    "pytorch_model.bin": b"4",
    "original/weights.safetensors": b"5",
}


class Hub:
    """Serves while it is entered. `served` are the files whose content was asked for."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.served: list[str] = []
        self.pretend: dict[str, int] = {}
        """File -> the size that the listing shows."""
        self.token: str | None = None
        self._held: str | None = None
        self._asked = threading.Condition()
        self._go_on = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, file: str) -> None:
        """Sends half of this file, and the rest after `release`."""
        self._held = file
        self._go_on.clear()

    def release(self) -> None:
        self._held = None
        self._go_on.set()

    def wait_for(self, file: str) -> None:
        """Until a client is sent this file."""
        with self._asked:
            assert self._asked.wait_for(lambda: file in self.served, timeout=300)

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a self of its own
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                api = f"/api/models/{hub.model}/"
                if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
                    self._error(401, "RepoNotFound")
                elif path.startswith("/api/") and not path.startswith(api):
                    self._error(404, "RepoNotFound")
                elif path in (f"{api}revision/main", f"{api}revision/{COMMIT}"):
                    names = [{"rfilename": file} for file in FILES]
                    self._json({"id": hub.model, "modelId": hub.model, "sha": COMMIT, "siblings": names})
                elif path == f"{api}tree/{COMMIT}":
                    self._json([self._entry(file) for file in FILES])
                elif path.startswith(f"/{hub.model}/resolve/{COMMIT}/"):
                    self._content(path.removeprefix(f"/{hub.model}/resolve/{COMMIT}/"))
                else:
                    self._error(404, "RevisionNotFound")

            def _entry(self, file: str) -> dict[str, Any]:
                size = hub.pretend.get(file, len(FILES[file]))
                return {"type": "file", "path": file, "size": size, "oid": _etag(file)}

            def _content(self, file: str) -> None:
                data = FILES[file]
                self._head(200, len(data), {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT})
                if self.command == "HEAD":
                    return
                with hub._asked:
                    hub.served.append(file)
                    hub._asked.notify_all()
                half = len(data) // 2 if hub._held == file else len(data)
                try:
                    self.wfile.write(data[:half])
                    self.wfile.flush()
                    if half < len(data):
                        hub._go_on.wait()
                        self.wfile.write(data[half:])
                except OSError:
                    self.close_connection = True  # whoever asked was killed

            def _json(self, body: Any) -> None:
                data = json.dumps(body).encode()
                self._head(200, len(data), {"Content-Type": "application/json"})
                if self.command == "GET":
                    self.wfile.write(data)

            def _error(self, status: int, code: str) -> None:
                self._head(status, 0, {"X-Error-Code": code, "X-Error-Message": "no"})

            def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(length)}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
                pass

        return Handler


def _etag(file: str) -> str:
    return hashlib.sha1(FILES[file]).hexdigest()
