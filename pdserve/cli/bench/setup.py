"""`pdserve bench --setup`"""

from __future__ import annotations

import asyncio
import os

from pdserve.bench.aiperf.environment import make
from pdserve.cli.console import Console


def run_setup() -> None:
    """A line for each step. Raises PreflightError."""
    console = Console()
    asyncio.run(make(os.environ, console.note))
