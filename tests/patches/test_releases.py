"""The number of an untagged build says nothing, its code does."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pdserve.installed.distributions import installed
from pdserve.patches import here
from pdserve.patches.fingerprint import Fingerprint, Known
from pdserve.patches.registry import REGISTRY
from pdserve.patches.releases import same_code, untagged

TABLE = {
    "vllm.a.f": (Known("()", "aaaa", ("0.30.0", "0.31.0")), Known("()", "bbbb", ("0.32.0", "0.33.0"))),
    "vllm.b.g": (Known("(x)", "cccc", ("0.30.0",)), Known("(x)", "dddd", ("0.31.0", "0.32.0", "0.33.0"))),
    "vllm.c.old": (Known("()", "eeee", ("0.30.0",)),),
    "lmcache.d.h": (Known("()", "ffff", ("0.5.6",)),),
}
AS_0_31 = {"vllm.a.f": Fingerprint("()", "aaaa"), "vllm.b.g": Fingerprint("(x)", "dddd")}
AS_0_33 = {"vllm.a.f": Fingerprint("()", "bbbb"), "vllm.b.g": Fingerprint("(x)", "dddd")}


def known(code: Mapping[str, Fingerprint], **versions: str | None) -> dict[str, str]:
    return same_code(versions, code.get, table=TABLE)


@pytest.mark.parametrize("version", ["0.1.dev5+gabc", "0.32.1.dev5+gabc", "0.40.0", "main-2026-08"])
def test_an_untagged_build_is_the_newest_release_whose_code_it_has(version: str) -> None:
    assert known(AS_0_31, vllm=version) == {"vllm": "0.31.0"}
    assert known(AS_0_33, vllm=version) == {"vllm": "0.33.0"}


@pytest.mark.parametrize(
    "code",
    [
        {**AS_0_33, "vllm.b.g": Fingerprint("(x)", "1234")},
        {**AS_0_33, "vllm.b.g": Fingerprint("(x, y)", "dddd")},
        {"vllm.a.f": Fingerprint("()", "aaaa"), "vllm.b.g": Fingerprint("(y)", "cccc")},
        {"vllm.a.f": Fingerprint("()", "bbbb")},
        {},
    ],
    ids=["another body", "another signature", "of two releases", "a part is missing", "nothing is there"],
)
def test_code_that_no_release_has_as_a_whole_stays_unknown(code: Mapping[str, Fingerprint]) -> None:
    assert known(code, vllm="0.1.dev5+gabc") == {}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.33.0rc1", "0.31.0"])
def test_the_number_of_a_release_is_believed(version: str) -> None:
    assert not untagged("vllm", version)
    assert known(AS_0_31, vllm=version) == {}


def test_a_known_release_outside_of_the_range_is_itself() -> None:
    table = {"vllm.a.f": (Known("()", "aaaa", ("0.24.0", "0.32.0")),)}
    assert same_code({"vllm": "0.24.0"}, AS_0_31.get, table=table) == {}
    assert same_code({"vllm": "0.25.0"}, AS_0_31.get, table=table) == {"vllm": "0.32.0"}


def test_each_package_is_recognised_by_its_own_code() -> None:
    code = {**AS_0_33, "lmcache.d.h": Fingerprint("()", "ffff")}
    assert known(code, vllm=None, lmcache="0.5.6.dev30+gabc", nixl="9") == {"lmcache": "0.5.6"}


def test_the_installed_code_gets_the_same_patches_whatever_it_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number a build without tags would be older than every release: engines refused to start for a patch that
    they do not need, and others were applied or left out against what the code needs."""
    tagged = {patch.name: here.judge_here(patch) for patch in REGISTRY}
    branch = {**installed(), "vllm": "0.1.dev5+gabc", "lmcache": "0.5.6.dev30+gabc"}
    monkeypatch.setattr(here, "installed", lambda: branch)
    here.versions_here.cache_clear()
    try:
        assert {patch.name: here.judge_here(patch) for patch in REGISTRY} == tagged
    finally:
        here.versions_here.cache_clear()
