"""`pdserve bench --setup`"""

from __future__ import annotations

import os

from pdserve.bench.aiperf.environment import make
from pdserve.cli.console import Console
from pdserve.system.stop_signals import run_to_its_end


def run_setup() -> None:
    """A line for each step. Raises PreflightError, and what `run_to_its_end` raises of a stop: the step that runs is
    ended with all that it has started."""
    console = Console()
    run_to_its_end(make(os.environ, console.note))
