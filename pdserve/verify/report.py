"""Hold what `verify` found: proofs, their outcomes, and the report. The command line decides how it looks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
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
    """Holds all proofs that apply to the deployment, in a fixed order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment: str
    proofs: tuple[Proof, ...]
    meanwhile: tuple[str, ...] = ()
    """What went wrong in the deployment while the proofs ran, from its history: deaths, restarts."""

    def having(self, status: Status) -> tuple[Proof, ...]:
        return tuple(proof for proof in self.proofs if proof.status == status)

    @property
    def exit_code(self) -> int:
        """Return 0, or the exit code of what `raise_for_status` raises."""
        if self.having("failed"):
            return VerifyError.exit_code
        return NotProvenError.exit_code if self.having("not-proven") else 0

    def raise_for_status(self) -> None:
        """Raise VerifyError when a proof failed, else NotProvenError when one could not be carried out."""
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
        """Return plain data, ready for json.dumps."""
        return self.model_dump(mode="json") | {"exit_code": self.exit_code}


@dataclass(frozen=True)
class Outcome:
    """Holds the status of a proof, its numbers and, unless proven, the reason and where to look."""

    status: Status
    numbers: Numbers = field(default_factory=dict)
    reason: str = ""
    goes_on: bool = False
    """Not proven, and yet the proofs that rest on it can be carried out."""


def proven(numbers: Mapping[str, Number]) -> Outcome:
    return Outcome("proven", dict(numbers))


def failed(reason: str, numbers: Mapping[str, Number], *, goes_on: bool = False) -> Outcome:
    return Outcome("failed", dict(numbers), reason, goes_on)


def not_proven(reason: str, numbers: Mapping[str, Number] | None = None, *, goes_on: bool = False) -> Outcome:
    return Outcome("not-proven", dict(numbers or {}), reason, goes_on)


OnProof = Callable[[Proof], None]


class Proofs:
    """Collects the proofs. `on_proof` hears of each proof as it is done."""

    def __init__(self, on_proof: OnProof | None) -> None:
        self._on_proof = on_proof
        self._done: list[Proof] = []

    @property
    def done(self) -> tuple[Proof, ...]:
        return tuple(self._done)

    async def carry_out(self, name: str, claim: str, prove: Callable[[], Awaitable[Outcome]]) -> bool:
        """Carry out a proof and add it. Returns whether what rests on it can be carried out."""
        began = time.monotonic()
        try:
            outcome = await prove()
        except NotProvenError as error:
            outcome = not_proven(one_line(error))
        except VerifyError as error:
            outcome = failed(one_line(error), {})
        self.add(name, claim, outcome, time.monotonic() - began)
        return outcome.status == "proven" or outcome.goes_on

    def add(self, name: str, claim: str, outcome: Outcome, seconds: float = 0.0) -> None:
        proof = Proof(
            name=name,
            claim=claim,
            status=outcome.status,
            numbers=outcome.numbers,
            reason=outcome.reason,
            seconds=round(seconds, 3),
        )
        self._done.append(proof)
        if self._on_proof:
            self._on_proof(proof)


def one_line(error: VerifyError) -> str:
    """Return the parts of an error in one line, for a reason."""
    parts = [f"{error.where}: {error.what}" if error.where else error.what]
    return "; ".join([*parts, *(part for part in (error.cause, error.todo) if part)])
