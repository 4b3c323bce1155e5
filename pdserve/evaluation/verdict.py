"""What came of an evaluation."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from pdserve.errors import VerifyError


class EvalVerdict(BaseModel):
    """Kept as verdict.json beside the harness's own results."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment: str
    task: str
    metric: str
    questions: int
    scores: tuple[float, ...]
    """Of each repeat."""
    stderr: float | None
    """The harness's own estimate for one repeat."""
    threshold: float
    folder: str
    """Where the harness's results, samples and log are."""

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def passed(self) -> bool:
        return self.mean >= self.threshold

    def raise_for_status(self) -> None:
        """Raises VerifyError below the threshold."""
        if not self.passed:
            raise VerifyError(
                f"{self.task}: {self.metric} is {self.mean:.4f}, at least {self.threshold:g} was asked for",
                where=self.deployment,
                cause="the deployment answers worse than the threshold, or the threshold is not this model's",
                todo=f"see the samples in {self.folder}; pdserve verify --load shows whether KV is wrong",
            )

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return self.model_dump(mode="json") | {"mean": self.mean, "passed": self.passed}
