"""Versions suggest, fingerprints decide; the number of an untagged build says nothing, its code does."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from pdserve.installed.distributions import installed
from pdserve.patches import verdict
from pdserve.patches.fingerprint import Fingerprint, Known
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.registry import REGISTRY, find
from pdserve.patches.verdict import Verdict, decide, is_untagged, judge, same_code
from tests.tables import each_row

OLD = Fingerprint("(self, data)", "aaaa")
REWRITTEN = Fingerprint("(self, data)", "bbbb")
FIXED = Fingerprint("(self, data)", "cccc")
CHANGED = Fingerprint("(self, data, more)", "aaaa")
TABLE = {
    "vllm.a.f": (
        Known("(self, data)", "aaaa", ("0.30.0", "0.31.0")),
        Known("(self, data)", "bbbb", ("0.32.0",)),
        Known("(self, data)", "cccc", ("0.33.0",)),
    ),
    "vllm.b.g": (Known("()", "dddd", ("0.31.0", "0.32.0", "0.33.0")),),
}


def patch(*targets: PatchTarget, vllm: str = "<0.33") -> Patch:
    return Patch(
        name="example",
        behaviour="metrics crash",
        summary="s",
        issue="i",
        vllm=vllm,
        targets=targets or (PatchTarget("vllm.a.f", body=True),),
        runs_in=("worker",),
        required=True,
        remove_when="never",
        apply=lambda: None,
    )


def outcome(subject: Patch, version: str | None, code: Mapping[str, Fingerprint | None]) -> str:
    return judge(subject, {"vllm": version}, look=lambda name: code.get(name), table=TABLE).outcome


@each_row("code, version", product([OLD, REWRITTEN], ["0.31.0", "0.33.0.dev5+gabc", "0.34.0", None]))
def test_a_nightly_build_with_code_that_has_the_defect_is_patched_whatever_it_is_called(
    code: Fingerprint, version: str | None
) -> None:
    assert outcome(patch(), version, {"vllm.a.f": code}) == "apply"


@each_row("version", ["0.31.0", "0.33.0", "0.32.9.dev1", "0.99", None])
def test_corrected_code_is_left_alone_and_unknown_code_unknown_whatever_it_is_called(version: str | None) -> None:
    assert outcome(patch(), version, {"vllm.a.f": FIXED}) == "not-needed"
    assert outcome(patch(), version, {"vllm.a.f": Fingerprint("(self, data)", "eeee")}) == "unknown"
    assert outcome(patch(), version, {}) == "unknown"


def test_a_target_whose_body_does_not_matter_is_compared_by_its_signature() -> None:
    loose = patch(PatchTarget("vllm.a.f"))
    assert outcome(loose, "0.31.0", {"vllm.a.f": Fingerprint("(self, data)", "eeee")}) == "apply"
    assert outcome(loose, "0.31.0", {"vllm.a.f": CHANGED}) == "unknown"


def test_where_released_code_is_the_same_on_both_sides_the_version_decides_and_without_a_range_nothing() -> None:
    shared = patch(PatchTarget("vllm.b.g", body=True))
    code = {"vllm.b.g": Fingerprint("()", "dddd")}
    assert outcome(shared, "0.32.0", code) == "apply"
    assert outcome(shared, "0.33.0", code) == "not-needed"
    assert outcome(shared, "0.33.1.dev2", code) == "apply"
    assert outcome(patch(vllm=""), "0.33.0", {"vllm.a.f": FIXED}) == "apply"


def test_a_target_that_only_some_versions_have_is_not_missed_in_the_others() -> None:
    both = patch(PatchTarget("vllm.a.f", body=True), PatchTarget("vllm.c.h", only="<0.31"))
    assert outcome(both, "0.32.0", {"vllm.a.f": OLD}) == "apply"
    assert outcome(both, None, {"vllm.a.f": OLD}) == "apply"


UNKNOWN = Verdict("unknown", "it is another one")


def test_unknown_code_is_left_alone_where_traffic_is_served_without_its_patch_and_refused_elsewhere() -> None:
    for name in ("mooncake-sends", "mooncake-pulls", "lmcache-lost-send"):
        assert decide(find(name), UNKNOWN, ()) == "left-out"
        assert find(name).required, "on known code it must be there"
    for name in ("stale-completions", "mooncake-requests", "load-timeout"):
        assert decide(find(name), UNKNOWN, ()) == "refused"
        assert decide(find(name), UNKNOWN, {name}) == "apply"


RELEASES = {
    "vllm.a.f": (Known("()", "aaaa", ("0.30.0", "0.31.0")), Known("()", "bbbb", ("0.32.0", "0.33.0"))),
    "vllm.b.g": (Known("(x)", "cccc", ("0.30.0",)), Known("(x)", "dddd", ("0.31.0", "0.32.0", "0.33.0"))),
    "vllm.c.old": (Known("()", "eeee", ("0.30.0",)),),
    "lmcache.d.h": (Known("()", "ffff", ("0.5.6",)),),
}
AS_0_31 = {"vllm.a.f": Fingerprint("()", "aaaa"), "vllm.b.g": Fingerprint("(x)", "dddd")}
AS_0_33 = {"vllm.a.f": Fingerprint("()", "bbbb"), "vllm.b.g": Fingerprint("(x)", "dddd")}


def known(code: Mapping[str, Fingerprint], **versions: str | None) -> dict[str, str]:
    return same_code(versions, code.get, table=RELEASES)


@each_row("version", ["0.1.dev5+gabc", "0.32.1.dev5+gabc", "0.40.0", "main-2026-08"])
def test_an_untagged_build_is_the_newest_release_whose_code_it_has(version: str) -> None:
    """Each package is recognised by its own code."""
    code = {**AS_0_33, "lmcache.d.h": Fingerprint("()", "ffff")}
    assert known(code, vllm=None, lmcache="0.5.6.dev30+gabc", nixl="9") == {"lmcache": "0.5.6"}
    assert known(AS_0_31, vllm=version) == {"vllm": "0.31.0"}
    assert known(AS_0_33, vllm=version) == {"vllm": "0.33.0"}


@each_row(
    "code",
    [
        {**AS_0_33, "vllm.b.g": Fingerprint("(x)", "1234")},
        {**AS_0_33, "vllm.b.g": Fingerprint("(x, y)", "dddd")},
        {"vllm.a.f": Fingerprint("()", "aaaa"), "vllm.b.g": Fingerprint("(y)", "cccc")},
        {"vllm.a.f": Fingerprint("()", "bbbb")},
        {},
    ],
)
def test_code_that_no_release_has_as_a_whole_stays_unknown(code: Mapping[str, Fingerprint]) -> None:
    assert known(code, vllm="0.1.dev5+gabc") == {}


@each_row("version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.33.0rc1", "0.31.0"])
def test_the_number_of_a_release_is_believed(version: str) -> None:
    assert not is_untagged("vllm", version)
    assert known(AS_0_31, vllm=version) == {}


def test_a_known_release_outside_of_the_range_is_itself() -> None:
    table = {"vllm.a.f": (Known("()", "aaaa", ("0.24.0", "0.32.0")),)}
    assert same_code({"vllm": "0.24.0"}, AS_0_31.get, table=table) == {}
    assert same_code({"vllm": "0.25.0"}, AS_0_31.get, table=table) == {"vllm": "0.32.0"}


def test_the_installed_code_gets_the_same_patches_whatever_it_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number a build without tags would be older than every release: engines refused to start for a patch that
    they do not need, and others were applied or left out against what the code needs."""
    tagged = {patch.name: verdict.judge_here(patch) for patch in REGISTRY}
    branch = {**installed(), "vllm": "0.1.dev5+gabc", "lmcache": "0.5.6.dev30+gabc"}
    monkeypatch.setattr(verdict, "installed", lambda: branch)
    verdict.versions_here.cache_clear()
    try:
        assert {patch.name: verdict.judge_here(patch) for patch in REGISTRY} == tagged
    finally:
        verdict.versions_here.cache_clear()
