"""The environment of each process: what is set, what is kept away, and that no secret has a value."""

from __future__ import annotations

import pytest

from pdserve.errors import RecipeError
from pdserve.node.supervised import environment
from pdserve.plan.environment import DEVICE_VARIABLES
from pdserve.plan.process import Env
from tests.plan.kit import MOONCAKE, NIXL, hosts, on_gpus, plan, recipe, with_lmcache


def test_engines_inherit_and_have_their_address_and_devices() -> None:
    env = plan(recipe(on_gpus(8, 8)), *hosts(8, 8)).process("decode-0").env
    assert env.base == "inherit"
    assert env.set["VLLM_HOST_IP"] == "192.0.2.2"
    assert env.set["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_nothing_is_both_set_and_unset() -> None:
    for process in plan(recipe(with_lmcache(), {"engine": {"cache_reset_endpoint": True}})).processes:
        assert not process.env.set.keys() & set(process.env.unset)


@pytest.mark.parametrize(
    "variable", ["VLLM_PORT", "VLLM_DP_RANK", "RANK", "MASTER_ADDR", "VLLM_PLUGINS", "LMCACHE_MP_TRANSFER_MODE"]
)
def test_what_would_change_an_engine_behind_the_plans_back_is_unset(variable: str) -> None:
    for name in ("prefill-0", "decode-0"):
        assert variable in plan(recipe()).process(name).env.unset


def test_all_device_variables_are_decided() -> None:
    for platform in ("cuda", "rocm"):
        env = plan(recipe(on_gpus(platform=platform)), *hosts(2)).process("prefill-0").env
        assert {*env.set, *env.unset} >= set(DEVICE_VARIABLES)


def test_lmcache_on_rocm_runs_in_the_modes_that_the_image_gives_its_engines() -> None:
    """Both open handles of one runtime: vLLM's ROCm image sets HSA_ENABLE_IPC_MODE_LEGACY=1."""
    built = plan(recipe(on_gpus(platform="rocm"), with_lmcache()), *hosts(2))
    image = {"HSA_ENABLE_IPC_MODE_LEGACY": "1", "HSA_XNACK": "0"}
    for name in ("lmcache-0", "prefill-0"):
        assert environment(built.process(name).env, image, {}).items() >= image.items()
    other = plan(recipe(on_gpus(), with_lmcache()), *hosts(2)).process("lmcache-0").env
    assert not environment(other, image, {}).keys() & image.keys()


def test_a_name_of_an_allow_list_with_a_star_stands_for_all_that_begin_so() -> None:
    rule = Env(base="allow", allow=("PATH", "HSA_*"), set={"HSA_A": "ours"})
    inherited = {"PATH": "/bin", "HSA_A": "1", "HSA_B": "2", "HSA": "3", "XHSA_B": "4", "PATHS": "5"}
    assert environment(rule, inherited, {}) == {"PATH": "/bin", "HSA_A": "ours", "HSA_B": "2"}


def test_block_hashes_agree_between_engines_and_lmcache() -> None:
    built = plan(recipe(with_lmcache(), {"engine": {"hash_seed": 7}}))
    assert {built.process(n).env.set["PYTHONHASHSEED"] for n in ("lmcache-0", "prefill-0", "decode-0")} == {"7"}


def test_the_recipes_variables_reach_the_engines_and_the_role_wins() -> None:
    change = {
        "engine": {"env": {"OMP_NUM_THREADS": 1, "SHARED": "a", "VLLM_NO_USAGE_STATS": 0}},
        "decode": {"env": {"SHARED": "b"}},
    }
    built = plan(recipe(change))
    assert built.process("prefill-0").env.set["SHARED"] == "a"
    assert built.process("decode-0").env.set["SHARED"] == "b"
    assert built.process("prefill-0").env.set["OMP_NUM_THREADS"] == "1"
    assert built.process("prefill-0").env.set["VLLM_NO_USAGE_STATS"] == "0"
    assert "SHARED" not in built.process("proxy").env.set


def test_what_the_plan_decides_wins_over_the_recipe() -> None:
    built = plan(recipe({"engine": {"env": {"VLLM_HOST_IP": "203.0.113.9", "PYTHONHASHSEED": 99}}}))
    assert built.process("prefill-0").env.set["VLLM_HOST_IP"] == "127.0.0.1"
    assert built.process("prefill-0").env.set["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
def test_engines_reach_each_other_past_the_proxy_of_the_site(variable: str) -> None:
    built = plan(recipe(on_gpus(8, 8)), *hosts(8, 8))
    for name in ("prefill-0", "decode-0"):
        assert built.process(name).env.set[variable] == "127.0.0.1,localhost,::1,192.0.2.1,192.0.2.2"


def test_an_address_is_excluded_once_and_the_proxy_itself_is_left_to_downloads() -> None:
    env = plan(recipe()).process("prefill-0").env
    assert env.set["NO_PROXY"] == "127.0.0.1,localhost,::1"
    assert not [name for name in env.unset if name.lower().endswith("_proxy")]


@pytest.mark.parametrize(
    ("chosen", "excluded"),
    [
        ({"no_proxy": "hub.example, 10.0.0.0/8"}, "hub.example,10.0.0.0/8,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "a.example", "no_proxy": "b.example"}, "a.example,b.example,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "::1"}, "::1,127.0.0.1,localhost"),
        ({"NO_PROXY": ""}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_what_the_recipe_excludes_from_the_proxy_stays_excluded(chosen: dict[str, str], excluded: str) -> None:
    env = plan(recipe({"engine": {"env": chosen}})).process("decode-0").env.set
    assert (env["NO_PROXY"], env["no_proxy"]) == (excluded, excluded)


def test_a_secret_list_of_exclusions_is_the_operators() -> None:
    env = plan(recipe({"engine": {"env": {"NO_PROXY": {"secret": "SITE"}}}})).process("decode-0").env
    assert "NO_PROXY" not in env.set
    assert env.set["no_proxy"] == "127.0.0.1,localhost,::1"


def test_mooncake_gets_its_ports_and_its_timeouts() -> None:
    built = plan(recipe({"timeouts": {"transfer_abort_seconds": 45}}))
    prefill, decode = built.process("prefill-0").env.set, built.process("decode-0").env.set
    assert prefill["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "8998"
    assert prefill["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] == decode["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] == "45"
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" not in decode


def test_over_tcp_mooncake_must_not_look_for_rdma() -> None:
    rdma = {**MOONCAKE, "protocol": "rdma"}
    over_rdma = recipe({"prefill": {"connector": rdma}, "decode": {"connector": rdma}})
    assert plan(recipe()).process("decode-0").env.set["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in plan(over_rdma).process("decode-0").env.set


def test_nixl_gets_its_side_channel() -> None:
    change = {"prefill": {"connector": NIXL}, "decode": {"connector": NIXL}}
    env = plan(recipe(on_gpus(8, 8), change), *hosts(8, 8)).process("decode-0").env.set
    assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "192.0.2.2"
    assert env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert "MC_MIN_RPC_PORT" not in env


def test_patches_are_named_for_the_plugin_and_for_the_record() -> None:
    built = plan(recipe(with_lmcache()))
    prefill, decode = built.process("prefill-0"), built.process("decode-0")
    assert prefill.env.set["PDSERVE_PATCHES"] == ",".join(prefill.patches)
    assert {"multiconnector-prom-metrics", "mooncake-cpu-device"} <= set(prefill.patches)
    assert "mooncake-cpu-device" in decode.patches
    assert "multiconnector-prom-metrics" not in decode.patches


def test_a_plugin_allow_list_of_the_recipe_lets_ours_in() -> None:
    def plugins(text: str) -> str:
        return plan(recipe({"engine": {"env": {"VLLM_PLUGINS": text}}})).process("prefill-0").env.set["VLLM_PLUGINS"]

    assert plugins("other") == "other,pdserve"
    assert plugins("pdserve,other") == "pdserve,other"
    assert plugins("") == "pdserve"


def test_development_endpoints_are_open_only_when_the_recipe_says_so() -> None:
    closed, opened = plan(recipe()), plan(recipe({"engine": {"cache_reset_endpoint": True}}))
    assert "VLLM_SERVER_DEV_MODE" in closed.process("prefill-0").env.unset
    assert opened.process("prefill-0").env.set["VLLM_SERVER_DEV_MODE"] == "1"


def test_a_local_model_keeps_engines_off_the_hub() -> None:
    by_id = {"model": {"path": None, "id": "org/model"}}
    assert plan(recipe()).process("prefill-0").env.set["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in plan(recipe(by_id)).process("prefill-0").env.set


def test_vllm_waits_for_its_engine_as_long_as_the_recipe_does() -> None:
    env = plan(recipe({"timeouts": {"engine_seconds": 1800.5}})).process("prefill-0").env.set
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "1801"


def test_secrets_are_names_only() -> None:
    change = {"engine": {"env": {"HF_TOKEN": {"secret": "MY_HF_TOKEN"}}}}
    built = plan(recipe(with_lmcache(), change))
    assert built.process("prefill-0").env.secrets == {"VLLM_API_KEY": "engine_key", "HF_TOKEN": "MY_HF_TOKEN"}
    assert built.process("proxy").env.secrets == {"PDSERVE_ENGINE_KEY": "engine_key"}
    for process in built.processes:
        assert not process.env.secrets.keys() & process.env.set.keys()


def test_lmcache_and_the_proxy_get_an_allow_list_without_credentials() -> None:
    built = plan(recipe(with_lmcache(env={"LMCACHE_LOG_LEVEL": "DEBUG"})))
    for name in ("lmcache-0", "proxy"):
        env = built.process(name).env
        assert env.base == "allow"
        assert {"PATH", "HOME", "LD_LIBRARY_PATH"} <= set(env.allow)
        assert not [v for v in env.allow if any(word in v for word in ("TOKEN", "KEY", "SECRET", "PROXY", "proxy"))]
    assert built.process("lmcache-0").env.secrets == {}
    assert built.process("lmcache-0").env.set["LMCACHE_LOG_LEVEL"] == "DEBUG"
    assert built.process("lmcache-0").env.set["LMCACHE_TRACK_USAGE"] == "false"


def test_a_secret_for_lmcache_is_refused_because_it_prints_its_environment() -> None:
    with pytest.raises(RecipeError, match="/env endpoint prints"):
        plan(recipe(with_lmcache(env={"TOKEN": {"secret": "TOKEN"}})))
