"""Removes the shared memory that a container of a node has left: `python -m pdserve.node.left_memory`.

Run in a new container of the same image, whose /dev/shm is the node's, once the one of the agent has ended. It sees all
processes of the node, so that what one of them uses stays. Prints the names of what it has removed, one a line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pdserve.node.agent_record import ledger_file
from pdserve.system import queued_output
from pdserve.system.shared_memory import ShmLedger


def main() -> int:
    """Remove the shared memory that nobody uses any more, and print its names."""
    queued_output.ensure_utf8()
    parser = argparse.ArgumentParser(prog="python -m pdserve.node.left_memory", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--node", required=True)
    options = parser.parse_args()
    for name in ShmLedger(ledger_file(options.run_dir, options.node)).remove_orphans():
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
