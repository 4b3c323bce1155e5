"""Defaults of the configuration that the parent of the proxy's processes needs without the modules that serve."""

from typing import Final

HOST: Final = "127.0.0.1"
PROCESSES: Final = 1
