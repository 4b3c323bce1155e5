"""The arithmetic of a bounded reload, its settings, and the models that a cap cannot be used with. No engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.connectors.lmcache_bounds import CAP_KEY, CAP_SWITCH, LEAST_KEY, Bounds, bounds, check_chunk
from pdserve.connectors.lmcache_groups import check_prefixes_load
from pdserve.errors import StartError

pytestmark = pytest.mark.process

CHUNK, BLOCK = 64, 16


@pytest.mark.parametrize("hit", [64, 128, 448])
@pytest.mark.parametrize("least", [0, 16, 64, 100, 256])
@pytest.mark.parametrize("cap", [0, 64, 100, 128, 256, 1000])
def test_a_reload_keeps_within_its_bounds_and_ends_at_a_boundary_of_chunks(cap: int, least: int, hit: int) -> None:
    for computed in range(0, hit, BLOCK):
        for offered in (hit - computed, hit - computed - 1):
            if not offered:
                continue
            taken = Bounds(cap, least).take(computed=computed, hit=hit, offered=offered, chunk=CHUNK)
            assert taken.end % CHUNK == 0
            assert taken.end <= hit
            if taken.tokens:
                assert taken.end == hit or computed + taken.tokens == taken.end
                assert least <= taken.tokens <= (cap or offered)
            else:
                assert least, "only a minimum refuses a load whose cap has room for a chunk"
                assert computed - CHUNK < taken.end <= computed, "no more than what vLLM has itself"


def test_a_cap_that_is_no_multiple_is_rounded_down_to_whole_chunks() -> None:
    assert Bounds(cap=100).take(computed=0, hit=448, offered=448, chunk=CHUNK) == (64, 64)


def test_the_cap_counts_from_where_the_local_prefix_ends() -> None:
    assert Bounds(cap=128).take(computed=48, hit=448, offered=400, chunk=CHUNK) == (128, 80)
    assert Bounds(cap=128).take(computed=64, hit=448, offered=384, chunk=CHUNK) == (192, 128)


@pytest.mark.parametrize(
    ("switch", "cap"), [(None, 512), ("", 512), (" ", 512), ("0", 0), ("256", 256), (" 32768 ", 32768)]
)
def test_the_environments_switch_overrides_the_configured_cap(switch: str | None, cap: int) -> None:
    environment = {} if switch is None else {CAP_SWITCH: switch}
    assert bounds({CAP_KEY: 512}, environment) == Bounds(cap=cap)


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "1e3", "٣"])
def test_what_is_no_number_of_tokens_is_an_error_that_names_the_switch(value: str) -> None:
    with pytest.raises(StartError, match=f"{CAP_SWITCH} is .*not a number of tokens"):
        bounds({}, {CAP_SWITCH: value})


@pytest.mark.parametrize("value", ["many", -1, 1.5, True, [512]])
def test_so_is_a_setting(value: Any) -> None:
    with pytest.raises(StartError, match=LEAST_KEY):
        bounds({LEAST_KEY: value}, {})


def test_a_minimum_above_the_cap_and_a_cap_below_a_chunk_are_refused() -> None:
    with pytest.raises(StartError, match="no reload of at most 256 tokens has 300"):
        bounds({CAP_KEY: 256, LEAST_KEY: 300}, {})
    with pytest.raises(StartError, match="whole chunks of 64"):
        check_chunk(Bounds(cap=63), CHUNK)
    check_chunk(Bounds(cap=0), CHUNK)


class FullAttentionSpec: ...


class MLAAttentionSpec: ...


class SlidingWindowSpec: ...


class MambaSpec: ...


def groups(*specs: object) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize("whole", [(), (FullAttentionSpec(),), (MLAAttentionSpec(), FullAttentionSpec())])
def test_a_cap_is_for_models_all_of_whose_layers_keep_the_whole_prefix(whole: tuple[object, ...]) -> None:
    check_prefixes_load(groups(*whole))
    check_prefixes_load(None)


@pytest.mark.parametrize("partial", [SlidingWindowSpec(), MambaSpec()])
def test_and_refused_for_a_model_whose_shorter_prefix_may_not_be_there(partial: object) -> None:
    by_layer = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": partial})
    for config in (groups(FullAttentionSpec(), partial), groups(by_layer)):
        with pytest.raises(StartError, match=type(partial).__name__):
            check_prefixes_load(config)
