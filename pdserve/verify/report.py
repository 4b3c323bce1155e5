"""What `verify` found, as data. How it looks on a terminal is the command line's business."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pdserve.errors import NotProvenError, VerifyError

Status = Literal["proven", "failed", "not-proven"]
Number = int | float | str | bool | None
Numbers = dict[str, Number]


class Proof(BaseModel):
    """One claim and what became of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    claim: str
    """One sentence that is true of the deployment if the status is `proven`."""
    status: Status
    numbers: Numbers = {}
    reason: str = ""
    """Why it is not proven, and where to look."""
    seconds: float = 0.0


class Report(BaseModel):
    """All proofs that apply to the deployment, in a fixed order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment: str
    proofs: tuple[Proof, ...]
    meanwhile: tuple[str, ...] = ()
    """What went wrong in the deployment while the proofs ran, from its history: deaths, restarts."""

    def having(self, status: Status) -> tuple[Proof, ...]:
        return tuple(proof for proof in self.proofs if proof.status == status)

    @property
    def exit_code(self) -> int:
        """0, or the exit code of what `raise_for_status` raises."""
        if self.having("failed"):
            return VerifyError.exit_code
        return NotProvenError.exit_code if self.having("not-proven") else 0

    def raise_for_status(self) -> None:
        """Raises VerifyError when a proof failed, else NotProvenError when one could not be carried out."""
        for status, error in (("failed", VerifyError), ("not-proven", NotProvenError)):
            proofs = tuple(proof for proof in self.proofs if proof.status == status)
            if proofs:
                raise error(
                    f"{', '.join(proof.name for proof in proofs)}: {status.replace('-', ' ')}",
                    where=self.deployment,
                    evidence=(
                        *(f"{proof.name}: {proof.reason}" for proof in proofs),
                        *(f"meanwhile: {line}" for line in self.meanwhile),
                    ),
                )

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return self.model_dump(mode="json") | {"exit_code": self.exit_code}
