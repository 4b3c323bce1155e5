"""Run as a script by test_real.py in an interpreter with the engines: their own parsers read planned command lines.

stdin: {"vllm": {name: arguments}, "lmcache": {name: arguments}, "keys": {connector class: keys of its extra config},
"stores": {name: content of its file}, "offloading": [extra config], "configs": {name: arguments}}
stdout: one JSON object, see `main`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve import patches
from pdserve.recipe.connectors.caches import LMCACHE_MODULE as LMCACHE_MODULE


def refused_by_vllm(arguments: list[str]) -> str:
    """What argparse of vLLM's API server says; nothing where it takes them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return _refused(lambda: parser.parse_args(arguments))


def flag_names() -> dict[str, Any]:
    """The names of vLLM's flags: whole, short, those without a value and those with any number of words."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    options = {
        next((text for text in action.option_strings if text.startswith("--")), action.option_strings[0]): action
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }
    return {
        "whole": [
            text[2:]
            for action in options.values()
            for text in action.option_strings
            if text.startswith("--") and not text.startswith("--no-")
        ],
        "short": {
            text[1:]: name[2:]
            for name, action in options.items()
            for text in action.option_strings
            if not text.startswith("--")
        },
        "switches": [name[2:] for name, action in options.items() if action.nargs == 0],
        "lists": [name[2:] for name, action in options.items() if action.nargs not in (None, "?", 0)],
    }


def refused_by_lmcache(arguments: list[str]) -> str:
    """The same of the LMCache MP server, whose module reads sys.argv."""
    from lmcache.v1.multiprocess import http_server

    sys.argv = ["http_server", *arguments]
    return _refused(http_server.parse_args)


def _refused(parse: Callable[[], object]) -> str:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parse()
    except SystemExit:
        return stderr.getvalue() or "it exits"
    return ""


def unread_keys(class_name: str, keys: list[str]) -> list[str]:
    """Keys that occur neither in the code beside the connector's class nor in a patch: nothing can read them."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1 import kv_offload

    file = sys.modules[KVConnectorFactory.get_connector_class_by_name(class_name).__module__].__file__
    # Those of OffloadingConnector are read by the memory that it keeps KV in.
    folders = (Path(file or "").parent, Path(kv_offload.__file__).parent, Path(patches.__file__).parent)
    code = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    # LMCache's adapter adds its prefix to the bare names.
    return [key for key in keys if f'"{key}"' not in code and f"{key.removeprefix('lmcache.mp.')} =" not in code]


def read_store(content: str) -> dict[str, Any]:
    """A file of MOONCAKE_CONFIG_PATH, as the connector's own class reads it."""
    from vllm.distributed.mooncake_store import MooncakeStoreConfig

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(content)
        file.flush()
        return dict(vars(MooncakeStoreConfig.from_file(file.name)))


def read_offloading(extra: dict[str, Any]) -> list[Any]:
    """The classes that OffloadingConnector would choose for these settings, and the threshold that they take."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    manager = CPUOffloadingManager(8, extra["eviction_policy"], store_threshold=extra["store_threshold"])
    return [OffloadingSpecFactory.get_spec_cls(extra).__name__, type(manager._policy).__name__, manager.store_threshold]


def configured(arguments: list[str]) -> dict[str, Any]:
    """What vLLM's configuration classes make of the command line of one engine, or {"error": why they refuse it}.

    Not built, because that takes more than a command line: ModelConfig (config.json of the model), SpeculativeConfig
    (that of the draft model too) and VllmConfig, in which the device's platform checks them together.
    """
    try:
        return _configure(arguments)
    except (ValueError, TypeError, KeyError, SystemExit, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _configure(arguments: list[str]) -> dict[str, Any]:
    from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    args = AsyncEngineArgs.from_cli_args(parsed)
    CacheConfig(block_size=args.block_size, cache_dtype=args.kv_cache_dtype)
    SchedulerConfig(
        max_model_len=args.max_model_len or 4096,
        max_num_seqs=args.max_num_seqs or 256,
        max_num_batched_tokens=args.max_num_batched_tokens or args.max_model_len or 4096,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
    )
    if parsed.tool_call_parser:
        ToolParserManager.get_tool_parser(parsed.tool_call_parser)
    if args.reasoning_parser:
        ReasoningParserManager.get_reasoning_parser(args.reasoning_parser)
    parallel = ParallelConfig(
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        data_parallel_size=args.data_parallel_size,
        data_parallel_size_local=args.data_parallel_size_local or 1,
        data_parallel_rank=args.data_parallel_rank or args.data_parallel_start_rank or 0,
        data_parallel_external_lb=args.data_parallel_external_lb,
        all2all_backend=args.all2all_backend,
        enable_expert_parallel=args.enable_expert_parallel,
        distributed_executor_backend="mp",
    )
    transfer = args.kv_transfer_config
    return {
        "world_size": parallel.world_size_across_dp,
        "connector": transfer and KVConnectorFactory.get_connector_class(transfer).__module__,
    }


def main() -> None:
    """Prints what the parsers refuse, vLLM's environment variables, and configuration keys that nobody reads."""
    asked = json.load(sys.stdin)
    from vllm import envs

    answer = {
        "vllm": {name: refused_by_vllm(arguments) for name, arguments in asked["vllm"].items()},
        "lmcache": {name: refused_by_lmcache(arguments) for name, arguments in asked["lmcache"].items()},
        "unread": {name: unread_keys(name, keys) for name, keys in asked["keys"].items()},
        "stores": {name: read_store(content) for name, content in asked["stores"].items()},
        "offloading": [read_offloading(extra) for extra in asked["offloading"]],
        "configs": {name: configured(arguments) for name, arguments in asked["configs"].items()},
        "control": unread_keys("MooncakeConnector", ["num_workers", "no_such_key"]),
        "lmcache_connector": hasattr(importlib.import_module(LMCACHE_MODULE), "LMCacheMPConnector"),
        "flags": flag_names(),
        "environment": sorted(envs.environment_variables),
    }
    print("ANSWER " + json.dumps(answer, default=str))


if __name__ == "__main__":
    main()
