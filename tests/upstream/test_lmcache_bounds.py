"""The arithmetic of a bounded reload, its settings, and the models that a cap cannot be used with. No engine."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.connectors.lmcache_loads import (
    CAP_KEY,
    CAP_SWITCH,
    LEAST_KEY,
    Bounds,
    check_chunk,
    check_prefixes_load,
    read_bounds,
)
from pdserve.errors import StartError

pytestmark = pytest.mark.process

CHUNK, BLOCK = 64, 16


def test_a_reload_keeps_within_its_bounds_and_ends_at_a_boundary_of_chunks() -> None:
    for cap, least, hit in product((0, 64, 100, 128, 256, 1000), (0, 16, 64, 100, 256), (64, 128, 448)):
        for computed, late in product(range(0, hit, BLOCK), (0, 1)):
            if not (offered := hit - computed - late):
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


def test_the_environments_switch_overrides_the_configured_cap() -> None:
    assert read_bounds({CAP_KEY: 512}, {}) == Bounds(cap=512)
    switches = {"": 512, " ": 512, "0": 0, "256": 256, " 32768 ": 32768}
    assert {each: read_bounds({CAP_KEY: 512}, {CAP_SWITCH: each}).cap for each in switches} == switches


def test_what_is_no_number_of_tokens_is_an_error_that_names_the_switch_or_setting() -> None:
    for switch in ("x", "-1", "1.5", "1e3", "٣"):
        with pytest.raises(StartError, match=f"{CAP_SWITCH} is .*not a number of tokens"):
            read_bounds({}, {CAP_SWITCH: switch})
    for value in ("many", -1, 1.5, True, [512]):
        with pytest.raises(StartError, match=LEAST_KEY):
            read_bounds({LEAST_KEY: value}, {})


def test_a_minimum_above_the_cap_and_a_cap_below_a_chunk_are_refused() -> None:
    with pytest.raises(StartError, match="no reload of at most 256 tokens has 300"):
        read_bounds({CAP_KEY: 256, LEAST_KEY: 300}, {})
    with pytest.raises(StartError, match="whole chunks of 64"):
        check_chunk(Bounds(cap=63), CHUNK)
    check_chunk(Bounds(cap=0), CHUNK)


FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec = (
    type(name, (), {}) for name in ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec")
)


def groups(*specs: object) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def test_a_cap_is_for_models_all_of_whose_layers_keep_the_whole_prefix() -> None:
    """And refused for one whose shorter prefix may not be there."""
    for whole in ((), (FullAttentionSpec(),), (MLAAttentionSpec(), FullAttentionSpec())):
        check_prefixes_load(groups(*whole))
    check_prefixes_load(None)
    for partial in (SlidingWindowSpec(), MambaSpec()):
        by_layer = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": partial})
        for config in (groups(FullAttentionSpec(), partial), groups(by_layer)):
            with pytest.raises(StartError, match=type(partial).__name__):
                check_prefixes_load(config)
