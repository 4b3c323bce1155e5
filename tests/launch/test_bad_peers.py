"""Who is to blame when no KV crosses between a new engine and its peers: histories, and what must come of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pdserve.launch.bad_peers import AGAIN_SECONDS, Outcome, PeerJudge, PeerVerdict

YES: Outcome = "crossed"
NO: Outcome = "failed"
BUSY: Outcome = "unknown"


@dataclass(frozen=True)
class Case:
    """Canaries of new engines, one after the other, and the verdict on the last."""

    what: str
    canaries: list[dict[str, Outcome]]
    verdict: PeerVerdict
    seconds: float = 10.0
    """Between two of them."""
    started: dict[int, str] = field(default_factory=dict)
    """Peers that were started anew before the canaries of that number."""


WELL = PeerVerdict(proven=True)
SUSPECT = PeerVerdict(proven=False)
CASES = [
    Case("nobody to try it with", [{}], WELL),
    Case("all well", [{"a": YES, "b": YES}], WELL),
    Case("nobody had time", [{"a": BUSY, "b": BUSY}], WELL),
    Case("one peer fails, another does not", [{"a": YES, "b": NO}], PeerVerdict(True, bad=("b",))),
    Case("three of four fail", [{"a": NO, "b": NO, "c": NO, "d": YES}], PeerVerdict(True, bad=("a", "b", "c"))),
    Case("all fail: the new engine is the suspect", [{"a": NO, "b": NO}], SUSPECT),
    Case("one fails, the others had no time", [{"a": NO, "b": BUSY}], SUSPECT),
    Case("its next life is well", [{"a": NO}, {"a": YES}], WELL),
    Case("the only peer fails with the next life too", [{"a": NO}, {"a": NO}], PeerVerdict(False, ("a",), True)),
    Case(
        "all peers fail with the next life too: one after the other",
        [{"a": NO, "b": NO}, {"a": NO, "b": NO}],
        PeerVerdict(False, ("a",), True),
    ),
    Case(
        "after the first is restarted the second is seen",
        [{"a": NO, "b": NO}, {"a": NO, "b": NO}, {"a": YES, "b": NO}],
        PeerVerdict(True, bad=("b",)),
        started={2: "a"},
    ),
    Case("KV crossed in between", [{"a": NO}, {"a": YES}, {"a": NO}], SUSPECT),
    Case("it was started anew in between", [{"a": NO}, {"a": NO}], SUSPECT, started={1: "a"}),
    Case(
        "a pair that fails again after the restart of one",
        [{"a": YES, "b": NO}, {"a": YES, "b": NO}],
        PeerVerdict(True, spared=("b",)),
        started={1: "b"},
    ),
    Case(
        "and again much later",
        [{"a": YES, "b": NO}, {"a": YES, "b": NO}],
        PeerVerdict(True, bad=("b",)),
        seconds=AGAIN_SECONDS,
        started={1: "b"},
    ),
    Case(
        "the only peer fails after its restart too: the new engine is the suspect again",
        [{"a": NO}, {"a": NO}, {"a": NO}, {"a": NO}],
        PeerVerdict(False, spared=("a",)),
        started={2: "a"},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_verdict(case: Case) -> None:
    judge = PeerJudge()
    verdict = None
    for number, outcomes in enumerate(case.canaries):
        if (peer := case.started.get(number)) is not None:
            judge.started(peer)
        verdict = judge.judge(outcomes, number * case.seconds)
    assert verdict == case.verdict
