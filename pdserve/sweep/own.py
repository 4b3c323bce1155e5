"""Which deployment a sweep has started: what another one does is nothing that it measures. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.bench.look import plan_digest
from pdserve.bench.result import BenchResult
from pdserve.bench.run import ServingDeployment
from pdserve.bench.validity import Reason

_CHECK = "deployment"
"""As that of a single measurement, which sees what changes while the client runs."""


@dataclass(frozen=True)
class OwnDeployment:
    """As it was when its run began."""

    run_id: str
    plan: str
    """Digest of its plan."""

    def unlike(self, serving: ServingDeployment) -> str | None:
        """Why what serves is another one; None: it is this one."""
        return self._why(serving.run.run_id, plan_digest(serving.plan))

    def not_measured_by(self, result: BenchResult) -> Reason | None:
        """Why a result is of another deployment, before, between or after its repeats; None: it is of this one."""
        for measurement in result.measurements:
            for snapshot in (measurement.before, measurement.after):
                if (why := self._why(snapshot.run_id, snapshot.plan)) is not None:
                    return not_own(why)
        return None

    def _why(self, run_id: str, plan: str) -> str | None:
        if run_id != self.run_id:
            return f"another run serves now: {run_id}"
        return None if plan == self.plan else "another plan was applied (pdserve up on the running deployment)"


def not_own(why: str) -> Reason:
    """Why a point is INVALID that this deployment did not serve."""
    return Reason(check=_CHECK, text=why)
