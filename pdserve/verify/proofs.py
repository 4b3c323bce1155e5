"""Carries proofs out, one after the other, and keeps what became of them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from pdserve.errors import NotProvenError, VerifyError
from pdserve.verify.outcome import Outcome, failed, not_proven
from pdserve.verify.report import Proof

OnProof = Callable[[Proof], None]


class Proofs:
    """`on_proof` hears of each proof as it is done."""

    def __init__(self, on_proof: OnProof | None) -> None:
        self._on_proof = on_proof
        self._done: list[Proof] = []

    @property
    def done(self) -> tuple[Proof, ...]:
        return tuple(self._done)

    async def carry_out(self, name: str, claim: str, prove: Callable[[], Awaitable[Outcome]]) -> bool:
        """False: what rests on it cannot be carried out."""
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
    """For a reason: the parts of the error in one line."""
    parts = [f"{error.where}: {error.what}" if error.where else error.what]
    return "; ".join([*parts, *(part for part in (error.cause, error.todo) if part)])
