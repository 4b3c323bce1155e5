"""What a known cause is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.roles import ENGINE_ROLES

ENGINES = frozenset(ENGINE_ROLES)
LMCACHE = frozenset({"lmcache"})


@dataclass(frozen=True)
class Rule:
    """One known cause. `roles`: where it applies, None everywhere."""

    pattern: re.Pattern[str]
    cause: str
    todo: str
    roles: frozenset[str] | None = None


def rule(pattern: str, cause: str, todo: str, roles: frozenset[str] | None = None) -> Rule:
    """A template may use the pattern's groups, {role} and {args} (the recipe key that holds the role's flags)."""
    return Rule(re.compile(pattern, re.MULTILINE), cause, todo, roles)
