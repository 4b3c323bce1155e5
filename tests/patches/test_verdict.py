"""Versions suggest, fingerprints decide."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pdserve.patches.fingerprint import Fingerprint, Known
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.registry import REGISTRY, find
from pdserve.patches.verdict import Verdict, decide, judge, way_out

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


@pytest.mark.parametrize("code", [OLD, REWRITTEN])
@pytest.mark.parametrize("version", ["0.31.0", "0.33.0.dev5+gabc", "0.34.0", None])
def test_a_nightly_build_with_code_that_has_the_defect_is_patched_whatever_it_is_called(
    code: Fingerprint, version: str | None
) -> None:
    assert outcome(patch(), version, {"vllm.a.f": code}) == "apply"


@pytest.mark.parametrize("version", ["0.33.0", "0.32.9.dev1", None])
def test_code_that_upstream_has_corrected_is_left_alone_whatever_it_is_called(version: str | None) -> None:
    assert outcome(patch(), version, {"vllm.a.f": FIXED}) == "not-needed"


@pytest.mark.parametrize("version", ["0.31.0", "0.99"])
def test_unknown_code_is_unknown_whatever_its_version(version: str) -> None:
    assert outcome(patch(), version, {"vllm.a.f": Fingerprint("(self, data)", "eeee")}) == "unknown"
    assert outcome(patch(), version, {}) == "unknown"


def test_a_target_whose_body_does_not_matter_is_compared_by_its_signature() -> None:
    loose = patch(PatchTarget("vllm.a.f"))
    assert outcome(loose, "0.31.0", {"vllm.a.f": Fingerprint("(self, data)", "eeee")}) == "apply"
    assert outcome(loose, "0.31.0", {"vllm.a.f": CHANGED}) == "unknown"


def test_where_released_code_is_the_same_on_both_sides_the_version_decides() -> None:
    shared = patch(PatchTarget("vllm.b.g", body=True))
    code = {"vllm.b.g": Fingerprint("()", "dddd")}
    assert outcome(shared, "0.32.0", code) == "apply"
    assert outcome(shared, "0.33.0", code) == "not-needed"
    assert outcome(shared, "0.33.1.dev2", code) == "apply"


def test_a_target_that_only_some_versions_have_is_not_missed_in_the_others() -> None:
    both = patch(PatchTarget("vllm.a.f", body=True), PatchTarget("vllm.c.h", only="<0.31"))
    assert outcome(both, "0.32.0", {"vllm.a.f": OLD}) == "apply"
    assert outcome(both, None, {"vllm.a.f": OLD}) == "apply"


def test_a_patch_without_a_range_is_never_upstreams_business() -> None:
    assert outcome(patch(vllm=""), "0.33.0", {"vllm.a.f": FIXED}) == "apply"


def test_the_reason_names_what_was_found() -> None:
    verdict = judge(patch(), {"vllm": "0.99"}, look=lambda name: CHANGED, table=TABLE)
    assert verdict.why == "vllm.a.f(self, data, more) [aaaa] of vllm 0.99 is none of the known ones"


UNKNOWN = Verdict("unknown", "it is another one")


@pytest.mark.parametrize("name", ["mooncake-sends", "mooncake-pulls", "lmcache-lost-send"])
def test_unknown_code_without_whose_patch_traffic_is_served_leaves_it_out(name: str) -> None:
    assert decide(find(name), UNKNOWN, ()) == "left-out"
    assert find(name).required, "on known code it must be there"


@pytest.mark.parametrize("name", ["stale-completions", "mooncake-requests", "load-timeout"])
def test_unknown_code_without_whose_patch_ordinary_requests_fail_is_refused(name: str) -> None:
    assert decide(find(name), UNKNOWN, ()) == "refused"
    assert decide(find(name), UNKNOWN, {name}) == "apply"


@pytest.mark.parametrize("subject", [patch for patch in REGISTRY if patch.required], ids=lambda patch: patch.name)
def test_the_way_out_that_is_named_last_is_the_one_that_is_not_safe(subject: Patch) -> None:
    text = way_out(subject)
    assert text.startswith("install ")
    assert text.endswith(f"allow_unknown_upstream: [{subject.name}]")
    assert subject.instead in text


def test_the_way_out_of_a_setting_is_to_do_without_it() -> None:
    assert "do without it: leave load_timeout_seconds out; or" in way_out(find("load-timeout"))
