"""What was measured of one system in one scenario."""

from __future__ import annotations

from dataclasses import dataclass

CONTROL, ALL = "unpatched", "all"
LIMIT = 1.03
"""What a patch may cost of a step."""


@dataclass(frozen=True)
class Figure:
    """A system in a scenario, beside unpatched schedulers that took the same steps."""

    scenario: str
    system: str
    step_us: float
    """Median over rounds."""
    unpatched_us: float
    rounds: int
    ratio: float
    low: float | None
    """End of the interval of the ratio; None where the rounds are too few for one."""
    high: float | None
    bytecodes: float
    """Ratio; it is exact."""
    instructions: float | None
    """Likewise; None without valgrind."""
    instructions_a_step: int | None

    @property
    def verdict(self) -> bool | None:
        """Whether it is below LIMIT; None: not decided."""
        if self.high is not None and self.high < LIMIT:
            return True
        return False if self.low is not None and self.low > LIMIT else None
