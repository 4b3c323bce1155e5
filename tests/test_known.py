"""What is known of versions: one list, and flags that a release lacks or ignores, in a recipe for it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.installed.versions import TESTED, Versions
from pdserve.known import DEFECTS, FLAGS, facts
from pdserve.patches.registry import REGISTRY
from pdserve.plan.model import Plan
from tests.plan.kit import VERSIONS, plan, recipe, with_lmcache
from tests.tables import each_row

MAMBA, PARTIAL, QUEUED = "enable-mamba-fine-grained-prefix-cache", "max-num-partial-prefills", "max-num-queued-reqs"


def planned(args: dict[str, Any], *, extra_args: dict[str, Any] | None = None, **versions: str | None) -> Plan:
    wanted = recipe(with_lmcache(extra_args=extra_args or {}), {"decode": {"args": args}})
    return plan(wanted, versions=VERSIONS.model_copy(update=versions))


def test_every_table_is_in_the_list_once_and_what_is_tested_has_nothing_that_is_refused() -> None:
    every = list(facts())
    assert len(every) == len(DEFECTS) + len(REGISTRY) + len(FLAGS)
    assert all(fact.what and fact.source and fact.todo for fact in every)
    assert len({(flag.package, flag.name, flag.versions) for flag in FLAGS}) == len(FLAGS)
    tested = Versions.model_validate(TESTED)
    assert not [fact for fact in every if fact.kind == "defect, refused" and fact.holds(tested)]


def test_a_fact_of_two_packages_holds_when_both_have_it() -> None:
    [both] = [fact for fact in facts() if set(fact.versions) == {"vllm", "lmcache"} and fact.kind == "defect, refused"]
    assert both.holds(Versions(vllm="0.21.0", lmcache="0.5.6"))
    assert not both.holds(Versions(vllm="0.26.0", lmcache="0.5.6"))
    assert not both.holds(Versions(vllm="0.21.0"))


@each_row("version, flag, what, todo", [
    ("0.27.1", PARTIAL, "0.26.0 was the last with it", "remove it"),
    ("0.32.0", MAMBA, "0.30.0 was the last with it", "write enable-mamba-shared-prefix-checkpoint: it was renamed"),
    ("0.28.0", QUEUED, "0.29 brought it", "use vllm >= 0.29, or remove it"),
])  # fmt: skip
def test_a_flag_that_a_release_lacks_is_refused_with_the_release_that_has_it(
    version: str, flag: str, what: str, todo: str
) -> None:
    with pytest.raises(PreflightError) as refused:
        planned({flag: 2}, vllm=version)
    assert refused.value.what == f"vllm {version} has no flag {flag}: {what}"
    assert (refused.value.where, refused.value.todo) == (f"decode.args.{flag}", todo)


@each_row("version, flag", [
    ("0.26.0", PARTIAL), ("0.27.0", PARTIAL), (None, PARTIAL), ("a-branch", PARTIAL), ("0.30.0", MAMBA),
    ("0.29.0", QUEUED), ("0.32.0", "enable-mamba-shared-prefix-checkpoint"),
])  # fmt: skip
def test_a_release_that_has_it_or_was_not_read_is_not_blamed(version: str | None, flag: str) -> None:
    assert planned({flag: 2}, vllm=version).names()


def test_a_flag_without_an_effect_is_a_warning() -> None:
    args = {"disable-cascade-attn": True}
    assert [w for w in planned(args).warnings if "vllm 0.32.0 ignores disable-cascade-attn" in w]
    assert not [w for w in planned(args, vllm="0.31.0").warnings if "ignores" in w]


def test_flags_of_the_lmcache_server_are_looked_at_too() -> None:
    extra = {"session-ttl-seconds": 60}
    with pytest.raises(PreflightError) as refused:
        planned({}, extra_args=extra, lmcache="0.5.5")
    assert refused.value.where == "lmcache.extra_args.session-ttl-seconds"
    assert planned({}, extra_args=extra).names()
