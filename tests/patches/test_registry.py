"""Which patches a deployment gets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.errors import RecipeError, StartError
from pdserve.patches.patch import Deployment, in_range, may_be, wrap
from pdserve.patches.registry import REGISTRY, find, select
from pdserve.plan.model import Versions
from tests.tables import each_row

PATH = frozenset({"MultiConnector", "MooncakeConnector", "LMCacheMPConnector"})


def deployment(
    vllm: str | None = None, platform: str = "cpu", connectors: frozenset[str] = PATH, lmcache: str | None = "0.5.6"
) -> Deployment:
    return Deployment(versions=Versions(vllm=vllm, lmcache=lmcache), platform=platform, connectors=connectors)


CRASH, SHIM, METRICS = "multiconnector-prom-metrics", "mooncake-cpu-device", "mooncake-prom-metrics"
NIXL, HIT = "nixl-failed-groups", "common-local-hit"
WITH_DEFECT = ("0.26.0", "0.32.0", "0.32.0+cpu", "0.32.1.post1", None, "unknown", "0.33.0rc1", "0.33.0.dev7+gabc")
"""Versions before the correction, and those that may be."""
CORRECTED = ("0.33.0", "0.33.0+rocm", "0.40")


def auto(vllm: str | None, platform: str = "cpu", connectors: frozenset[str] = PATH) -> tuple[str, ...]:
    return select("auto", deployment(vllm, platform, connectors))


def only(*connectors: str) -> frozenset[str]:
    return frozenset(f"{name}Connector" for name in connectors)


@each_row(
    "vllm, platform, connectors, taken, left_out",
    [
        *((vllm, "cpu", PATH, {CRASH, SHIM, METRICS}, set[str]()) for vllm in WITH_DEFECT),
        *((vllm, "cpu", PATH, {SHIM}, {CRASH, METRICS}) for vllm in CORRECTED),
        ("0.32.0", "cpu", PATH, {"stale-completions", "mooncake-requests", "mooncake-sends", "mooncake-pulls"}, set()),
        ("0.32.0", "cuda", PATH, {CRASH}, {SHIM, NIXL}),
        ("0.32.0", "cpu", only("Mooncake"), {SHIM, METRICS}, {CRASH}),
        ("0.32.0", "cpu", only("Multi", "Nixl", "LMCacheMP"), set(), {CRASH, SHIM, METRICS}),
        ("0.32.0", "cpu", only("Multi", "Nixl", "MooncakeStore"), {CRASH}, {SHIM, METRICS}),
        ("0.32.0", "cpu", only("Multi", "Other"), {CRASH}, {SHIM, METRICS}),
        ("0.26.0", "cuda", only("Nixl"), {NIXL, HIT}, set()),
        ("0.28.0", "cuda", only("Nixl"), {NIXL}, {HIT}),
        ("0.30.0", "cuda", only("Nixl"), set(), {NIXL, HIT}),
        (None, "cuda", only("Nixl"), {NIXL, HIT}, set()),
        ("0.27.1", "cuda", PATH, {HIT}, {NIXL}),
    ],
)
def test_auto_takes_a_patch_for_its_versions_platform_and_connectors(
    vllm: str | None, platform: str, connectors: frozenset[str], taken: set[str], left_out: set[str]
) -> None:
    chosen = set(auto(vllm, platform, connectors))
    assert (taken - chosen, left_out & chosen) == (set(), set())


def test_an_engine_without_a_connector_gets_no_patch() -> None:
    assert auto("0.32.0", connectors=frozenset()) == ()


def test_what_a_setting_provides_is_not_applied_without_it() -> None:
    provided = {patch.name for patch in REGISTRY if patch.settings}
    assert provided
    assert not provided & set(auto("0.32.0"))
    for patch in REGISTRY:
        for setting in patch.settings:
            asked = Deployment(
                versions=Versions(vllm="0.32.0", lmcache="0.5.6"),
                platform=patch.platforms[-1],
                connectors=PATH,
                settings=frozenset({setting}),
            )
            assert (patch.name in select("auto", asked)) == (may_be("0.5.6", patch.lmcache))


def test_a_list_is_taken_as_it_is_whatever_the_versions() -> None:
    chosen = select(["mooncake-cpu-device"], deployment("0.99", "cuda", frozenset()))
    assert chosen == ("mooncake-cpu-device",)
    assert select([], deployment()) == ()


def test_a_list_keeps_the_order_of_the_registry_and_names_each_once() -> None:
    names = [patch.name for patch in REGISTRY]
    chosen = select([*reversed(names), *names], deployment())
    assert chosen == tuple(names)


def test_an_unknown_name_is_a_recipe_error_with_a_suggestion_or_what_there_is() -> None:
    with pytest.raises(RecipeError, match="moncake-cpu-device") as caught:
        select(["moncake-cpu-device"], deployment())
    assert (caught.value.exit_code, caught.value.todo) == (2, "did you mean 'mooncake-cpu-device'?")
    with pytest.raises(RecipeError) as caught:
        find("zzz")
    assert all(patch.name in str(caught.value.todo) for patch in REGISTRY)


@each_row(
    "version, specifier, inside",
    [
        ("0.32.9", "<0.33", True),
        ("0.33.0rc1", "<0.33", True),
        ("0.33", "<0.33", False),
        ("0.25.0", ">=0.26,<0.33", False),
        ("0.26.0", ">=0.26,<0.33", True),
        ("9.9", "", True),
    ],
)
def test_ranges_count_the_pre_releases_of_an_upper_bound(version: str, specifier: str, inside: bool) -> None:
    assert in_range(version, specifier) is inside


def test_names_are_unique_and_every_patch_has_what_it_takes_hold_of() -> None:
    assert len({patch.name for patch in REGISTRY if patch.targets}) == len(REGISTRY)


@pytest.mark.process
def test_reading_the_registry_imports_no_engine() -> None:
    code = (
        "import sys, pdserve.patches.registry, pdserve.patches.plugin;"
        "sys.exit(','.join({'vllm', 'torch', 'lmcache', 'mooncake'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def doubled(original: Callable[..., int]) -> Callable[..., int]:
    def add(self: object, amount: int, times: int = 1) -> int:
        return original(self, amount * 2, times)

    return add


def make_target() -> Any:
    class Target:
        def __init__(self) -> None:
            self.total = 0

        def add(self, amount: int, times: int = 1) -> int:
            """Upstream's words."""
            self.total += amount * times
            return self.total

    return Target


def test_the_original_is_called_once_for_each_patch_with_what_the_wrapper_lets_through() -> None:
    target = make_target()
    for patch in ("double", "again", "double", "again"):
        wrap(target, "add", patch=patch, around=doubled)
    assert target().add(3, times=2) == 24
    assert target.add.__doc__ == "Upstream's words."
    with pytest.raises(StartError, match=r"Target\.subtract does not exist"):
        wrap(target, "subtract", patch="double", around=doubled)
