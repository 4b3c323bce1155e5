"""Flags that a release lacks or ignores, in a recipe for it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.known import FLAGS
from pdserve.plan.model import Plan
from tests.plan.kit import VERSIONS, plan, recipe, with_lmcache
from tests.tables import each_row


def planned(args: dict[str, Any], *, extra_args: dict[str, Any] | None = None, **versions: str | None) -> Plan:
    wanted = recipe(with_lmcache(extra_args=extra_args or {}), args)
    return plan(wanted, versions=VERSIONS.model_copy(update=versions))


@each_row("version", ["0.27.1", "0.30.0", "0.33.0"])
def test_a_flag_that_was_removed_is_refused_with_the_release_that_had_it(version: str) -> None:
    with pytest.raises(PreflightError) as refused:
        planned({"engine": {"args": {"max-num-partial-prefills": 2}}}, vllm=version)
    assert refused.value.what == f"vllm {version} has no flag max-num-partial-prefills: 0.26.0 was the last with it"
    assert refused.value.where == "engine.args.max-num-partial-prefills"


@each_row("version", ["0.26.0", "0.27.0", None, "a-branch"])
def test_a_release_that_has_it_or_was_not_read_is_not_blamed(version: str | None) -> None:
    assert planned({"engine": {"args": {"max-num-partial-prefills": 2}}}, vllm=version).names()


def test_a_flag_that_was_renamed_is_refused_with_its_new_name() -> None:
    old = {"decode": {"args": {"enable-mamba-fine-grained-prefix-cache": True}}}
    assert planned(old, vllm="0.30.0").names()
    with pytest.raises(PreflightError) as refused:
        planned(old)
    assert refused.value.where == "decode.args.enable-mamba-fine-grained-prefix-cache"
    new = {"decode": {"args": {"enable-mamba-shared-prefix-checkpoint": True}}}
    assert "enable-mamba-shared-prefix-checkpoint" in str(refused.value.todo)
    assert planned(new).names()


def test_a_flag_of_a_later_release_is_refused_with_that_release() -> None:
    with pytest.raises(
        PreflightError, match=r"vllm 0\.28\.0 has no flag max-num-queued-reqs: 0\.29 brought it"
    ) as refused:
        planned({"engine": {"args": {"max-num-queued-reqs": 9}}}, vllm="0.28.0")
    assert refused.value.what == "vllm 0.28.0 has no flag max-num-queued-reqs: 0.29 brought it"
    assert refused.value.todo == "use vllm >= 0.29, or remove it"
    assert planned({"engine": {"args": {"max-num-queued-reqs": 9}}}, vllm="0.29.0").names()


def test_a_flag_without_an_effect_is_a_warning() -> None:
    args = {"engine": {"args": {"disable-cascade-attn": True}}}
    assert [w for w in planned(args).warnings if "vllm 0.32.0 ignores disable-cascade-attn" in w]
    assert not [w for w in planned(args, vllm="0.31.0").warnings if "ignores" in w]


def test_flags_of_the_lmcache_server_are_looked_at_too() -> None:
    extra = {"session-ttl-seconds": 60}
    with pytest.raises(PreflightError) as refused:
        planned({}, extra_args=extra, lmcache="0.5.5")
    assert refused.value.where == "lmcache.extra_args.session-ttl-seconds"
    assert planned({}, extra_args=extra).names()


def test_a_flag_is_in_the_table_once() -> None:
    assert len({(flag.package, flag.name, flag.versions) for flag in FLAGS}) == len(FLAGS)
