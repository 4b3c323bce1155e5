"""The parent of every preloaded.py: starts one for each version of vLLM, hands it probes one at a time.

`python -m tests.upstream.preloaders`, spoken to by run.py over stdin and stdout; when stdin ends, so do all of them.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from typing import Any

_started: dict[str, subprocess.Popen[str]] = {}


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"code": _run(order)}), flush=True)
    for popen in _started.values():
        _end(popen)


def _run(order: dict[str, Any]) -> int | None:
    """The exit code of the probe; None when it was late or its process died."""
    key: str = order["key"]
    if key not in _started:
        _started[key] = subprocess.Popen(
            [sys.executable, "-m", "tests.upstream.preloaded"],
            env=order["environment"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    popen = _started[key]
    assert popen.stdin is not None
    assert popen.stdout is not None
    popen.stdin.write(json.dumps(order["request"]) + "\n")
    popen.stdin.flush()
    ready, _, _ = select.select([popen.stdout], [], [], order["timeout"])
    answer = popen.stdout.readline() if ready else ""
    if not answer:
        _end(_started.pop(key))
        return None
    code: int = json.loads(answer)["code"]
    return code


def _end(popen: subprocess.Popen[str]) -> None:
    popen.kill()
    popen.wait()


if __name__ == "__main__":
    main()
