"""Run as a script by test_real.py: starts Mooncake's transfer engine over TCP and prints the ports it listens on."""

from __future__ import annotations

import json
import os

from pdserve.system import procfs


def main() -> None:
    """The environment says which ports it may take."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    started = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    ports = sorted(procfs.listening_ports([os.getpid()]))
    print("ANSWER " + json.dumps({"started": started == 0, "rpc": engine.get_rpc_port(), "listening": ports}))


if __name__ == "__main__":
    main()
