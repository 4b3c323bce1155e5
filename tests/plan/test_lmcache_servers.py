"""LMCache servers: how many, their command line, and what the launcher is told of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.plan.model import Plan
from pdserve.plan.process import LmcacheProbe
from tests.plan.kit import LMCACHE, MOONCAKE, MULTI, aggregated, hosts, on_gpus, plan, recipe, value_of, with_lmcache

GIB = 1 << 30
GPU = with_lmcache(transfer_mode="lmcache_driven")


def servers(built: Plan) -> dict[str, tuple[str, tuple[str, ...], int]]:
    return {s.process: (built.process(s.process).node, s.engines, s.expected_workers) for s in built.lmcache}


def test_the_command_line_on_a_cpu() -> None:
    assert plan(recipe(with_lmcache())).process("lmcache-0").argv == (
        *("python", "-m", "pdserve.patches.lmcache_server_main"),
        *("--instance-id", "r1-lmcache-0"),
        *("--host", "127.0.0.1", "--port", "5555", "--http-host", "127.0.0.1", "--http-port", "8080"),
        *("--l1-size-gb", "1", "--no-l1-use-lazy"),
        *("--l1-read-ttl-seconds", "7200", "--l1-write-ttl-seconds", "600"),
        *("--chunk-size", "256", "--max-workers", "1"),
        *("--eviction-policy", "LRU", "--eviction-trigger-watermark", "0.8", "--eviction-ratio", "0.2"),
        *("--supported-transfer-mode", "auto", "--worker-reap-timeout-seconds", "120"),
    )


def test_on_a_gpu_the_pool_grows_from_its_first_part() -> None:
    process = plan(recipe(on_gpus(4, 1), GPU, {"lmcache": {"l1_size_gb": 900}}), *hosts(8)).process("lmcache-0")
    assert value_of(process, "--l1-init-size-gb") == "20"
    assert value_of(process, "--max-workers") == "4"
    assert "--no-l1-use-lazy" not in process.argv


def test_the_first_part_is_never_larger_than_the_whole() -> None:
    process = plan(recipe(on_gpus(), GPU, {"lmcache": {"l1_size_gb": 8.5}}), *hosts(8)).process("lmcache-0")
    assert (value_of(process, "--l1-size-gb"), value_of(process, "--l1-init-size-gb")) == ("8.5", "8")


def test_adapters_and_further_flags_are_data() -> None:
    section = {
        "l2": [{"type": "fs", "base_path": "/tmp/a b"}, {"type": "resp", "port": 1}],
        "shm_name": "pool",
        "max_workers": 3,
        "extra_args": {"session-ttl-seconds": 60, "isolated-ipc": False},
    }
    argv = plan(recipe(with_lmcache(**section))).process("lmcache-0").argv
    adapters = [argv[i + 1] for i, word in enumerate(argv) if word == "--l2-adapter"]
    assert [json.loads(adapter) for adapter in adapters] == [
        {"type": "fs", "base_path": "/tmp/a b", "relative_tmp_dir": ".staging-test-lmcache-0-localhost"},
        {"type": "resp", "port": 1},
    ]
    assert argv[argv.index("--shm-name") + 1] == "pool"
    assert argv[argv.index("--max-workers") + 1] == "3"
    assert argv[-3:] == ("--session-ttl-seconds", "60", "--no-isolated-ipc")


def test_servers_that_share_a_folder_of_l2_stage_apart_unless_the_recipe_sets_where() -> None:
    """lmcache#4991: two that write one key into one unfinished file leave a cut one under the final name."""

    def staged(**adapter: Any) -> list[str | None]:
        section = with_lmcache(per="tp-rank", transfer_mode="lmcache_driven", l2=[{"base_path": "/cache", **adapter}])
        built = plan(recipe(on_gpus(2, 1), section), *hosts(8))
        argvs = [process for process in built.processes if process.role == "lmcache"]
        return [json.loads(value_of(argv, "--l2-adapter")).get("relative_tmp_dir") for argv in argvs]

    for kind in ("fs", "fs_native"):
        folders = staged(type=kind)
        assert len(folders) == len(set(folders)) == 2
        assert all(folder and folder.startswith(".staging-") and "/" not in folder for folder in folders)
    assert staged(type="fs", relative_tmp_dir="mine") == ["mine", "mine"]
    assert staged(type="s3") == [None, None]


def test_it_is_healthy_only_under_our_instance_id() -> None:
    built = plan(recipe(with_lmcache()))
    probe = built.process("lmcache-0").probe
    assert probe == LmcacheProbe(host="127.0.0.1", port=8080, instance_id="r1-lmcache-0")
    assert value_of(built.process("lmcache-0"), "--instance-id") == built.lmcache[0].instance_id


def test_instances_of_one_node_share_a_server() -> None:
    built = plan(recipe(with_lmcache(), {"prefill": {"instances": 2}}))
    assert servers(built) == {"lmcache-0": ("localhost", ("prefill-0", "prefill-1"), 2)}
    assert value_of(built.process("lmcache-0"), "--max-workers") == "2"
    assert {built.process(name).lmcache for name in ("prefill-0", "prefill-1")} == {"lmcache-0"}
    assert built.process("decode-0").lmcache is None


def test_every_node_has_its_own_server_and_no_engine_asks_that_of_another_node() -> None:
    built = plan(recipe(on_gpus(8, 8), GPU, {"prefill": {"instances": 2}}), *hosts(8, 8, 8))
    assert servers(built) == {
        "lmcache-0": ("host0", ("prefill-0",), 8),
        "lmcache-1": ("host1", ("prefill-1",), 8),
    }
    assert [s.instance_id for s in built.lmcache] == ["r1-lmcache-0", "r1-lmcache-1"]


def test_a_node_without_an_attached_engine_has_no_server() -> None:
    built = plan(recipe(on_gpus(8, 8), GPU), *hosts(8, 8))
    assert {built.process(s.process).node for s in built.lmcache} == {"host0"}


def test_one_server_a_rank_expects_that_rank_of_every_instance() -> None:
    section = with_lmcache(per="tp-rank", on=["prefill", "decode"], transfer_mode="lmcache_driven")
    built = plan(recipe(on_gpus(4, 2), section, {"decode": {"connector": MULTI}}), *hosts(8))
    assert servers(built) == {
        "lmcache-0": ("host0", ("prefill-0", "decode-0"), 2),
        "lmcache-1": ("host0", ("prefill-0", "decode-0"), 2),
        "lmcache-2": ("host0", ("prefill-0",), 1),
        "lmcache-3": ("host0", ("prefill-0",), 1),
    }
    assert [built.process(f"lmcache-{i}").ports for i in (0, 3)] == [
        {"request": 5555, "http": 8080},
        {"request": 5558, "http": 8083},
    ]
    assert built.process("prefill-0").lmcache == "lmcache-0"


def test_workers_are_counted_over_all_parallelism() -> None:
    parallel = {"tp": 2, "pp": 2, "dp": 2}
    built = plan(recipe(on_gpus(), GPU, {"prefill": {"parallel": parallel}}), *hosts(16))
    assert built.lmcache[0].expected_workers == 8


def test_the_workers_of_each_engine_are_known() -> None:
    both = with_lmcache(transfer_mode="lmcache_driven", on=["prefill", "decode"])
    sizes = {"prefill": {"instances": 2}, "decode": {"connector": MULTI}}
    one = plan(recipe(on_gpus(2, 4), both, sizes), *hosts(8)).lmcache[0]
    assert one.workers_of == {"prefill-0": 2, "prefill-1": 2, "decode-0": 4}
    assert one.expected_workers == 8
    per_rank = plan(recipe(on_gpus(2, 4), both, sizes, {"lmcache": {"per": "tp-rank"}}), *hosts(8)).lmcache
    assert [server.workers_of for server in per_rank] == [
        *[{"prefill-0": 1, "prefill-1": 1, "decode-0": 1}] * 2,
        *[{"decode-0": 1}] * 2,
    ]


def test_it_sees_the_devices_of_the_engines_that_attach() -> None:
    built = plan(recipe(on_gpus(2, 2, "rocm"), GPU), *hosts(8))
    assert built.process("lmcache-0").env.set["HIP_VISIBLE_DEVICES"] == "0,1"


def test_its_memory_is_what_it_will_really_use() -> None:
    (server,) = plan(recipe(with_lmcache(), {"lmcache": {"l1_size_gb": 2.5}})).lmcache
    assert (server.l1_bytes, server.kv_bytes_on_host, server.shm_name) == (int(2.5 * GIB), 0, None)


LMCACHE_DRIVEN = {
    "prefill": {"connector": {"kind": "multi", "of": [LMCACHE, MOONCAKE]}, "instances": 2},
    "lmcache": {"l1_size_gb": 1, "transfer_mode": "lmcache_driven"},
}


def test_on_a_cpu_lmcache_driven_moves_the_engines_kv_to_the_host_too() -> None:
    change = {"engine": {"env": {"VLLM_CPU_KVCACHE_SPACE": 2}}}
    (server,) = plan(recipe(LMCACHE_DRIVEN, change)).lmcache
    assert server.kv_bytes_on_host == 2 * 2 * GIB


def test_an_unknown_size_of_that_kv_is_a_warning() -> None:
    built = plan(recipe(LMCACHE_DRIVEN))
    assert built.lmcache[0].kv_bytes_on_host == 0
    assert [w for w in built.warnings if "VLLM_CPU_KVCACHE_SPACE" in w]


@pytest.mark.parametrize(("on_death", "policy"), [("restart", "on-failure"), ("fail", "never")])
def test_what_its_death_means_is_the_recipes_decision(on_death: str, policy: str) -> None:
    built = plan(recipe(with_lmcache(on_death=on_death)))
    assert built.lmcache[0].on_death == on_death
    assert built.process("lmcache-0").restart.policy == policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": {"parallel": {"tp": 1, "dp": 2}}}, "tensor parallelism only"),
        ({"prefill": {"parallel": {"tp": 1, "pp": 2}}}, "tensor parallelism only"),
        ({"prefill": {"parallel": {"tp": 2, "nodes": 2}}}, "spans nodes"),
    ],
)
def test_what_one_server_a_rank_cannot_serve_is_refused(change: dict[str, Any], message: str) -> None:
    section = with_lmcache(per="tp-rank", transfer_mode="lmcache_driven")
    with pytest.raises(RecipeError, match=message):
        plan(recipe(on_gpus(), section, change), *hosts(4, 4))


def test_an_aggregated_engine_attaches_too() -> None:
    assert servers(plan(recipe(aggregated()))) == {"lmcache-0": ("localhost", ("aggregated-0",), 1)}
