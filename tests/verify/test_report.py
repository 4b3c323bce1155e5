"""What a report says to people, to programs and to the shell."""

from __future__ import annotations

import pytest

from pdserve.errors import NotProvenError, VerifyError
from pdserve.verify import Proof, Report, Status


def report(*statuses: Status) -> Report:
    proofs = tuple(
        Proof(name=f"proof-{i}", claim="It is so.", status=status, reason="" if status == "proven" else f"reason {i}")
        for i, status in enumerate(statuses)
    )
    return Report(deployment="tiny", proofs=proofs)


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("proven", "proven"), 0),
        (("proven", "not-proven"), 7),
        (("failed", "proven"), 6),
        (("not-proven", "failed"), 6),
    ],
)
def test_a_failed_proof_outweighs_an_open_one(statuses: tuple[Status, ...], code: int) -> None:
    assert report(*statuses).exit_code == code
    assert report(*statuses).to_json()["exit_code"] == code


def test_what_is_proven_raises_nothing() -> None:
    report("proven").raise_for_status()


def test_the_error_names_the_proofs_and_their_reasons() -> None:
    with pytest.raises(VerifyError) as caught:
        report("proven", "failed", "not-proven").raise_for_status()
    assert not isinstance(caught.value, NotProvenError)
    text = caught.value.render()
    assert "tiny: proof-1: failed" in text
    assert "reason 1" in text
    assert "reason 2" not in text


def test_open_proofs_have_an_exit_code_of_their_own() -> None:
    with pytest.raises(NotProvenError, match="proof-0: not proven") as caught:
        report("not-proven").raise_for_status()
    assert caught.value.exit_code == 7
