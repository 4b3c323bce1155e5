"""Known causes of death, most specific first: a pattern of the log -> what it means -> what to do.

Wordings are those of vLLM 0.26 to 0.33, LMCache 0.5, Mooncake 0.3, torch 2.13 and uvicorn; most were taken from runs
with a broken argument (tests/fixtures/logs). Each subject has a module.
"""

from __future__ import annotations

from pdserve.logs.known_causes.command_line import COMMAND_LINE
from pdserve.logs.known_causes.devices import DEVICES
from pdserve.logs.known_causes.general import GENERAL
from pdserve.logs.known_causes.lmcache import LMCACHE_RULES
from pdserve.logs.known_causes.memory import MEMORY
from pdserve.logs.known_causes.model import MODEL
from pdserve.logs.known_causes.packages import PACKAGES
from pdserve.logs.known_causes.rule import Rule
from pdserve.logs.known_causes.transfer import TRANSFER

RULES: tuple[Rule, ...] = (
    *COMMAND_LINE,
    *LMCACHE_RULES,
    *TRANSFER,
    *PACKAGES,
    *MEMORY,
    *DEVICES,
    *MODEL,
    *GENERAL,
)
"""Causes that a log names. The first that matches counts: what follows is more general."""
