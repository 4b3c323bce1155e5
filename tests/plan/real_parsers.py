"""Run as a script by test_real.py in an interpreter with the engines: their own parsers read planned command lines.

stdin: {"vllm": {name: arguments}, "lmcache": {name: arguments}, "keys": {connector class: keys of its extra config},
"stores": {name: content of its file}, "offloading": [extra config], "configs": {name: arguments}}
stdout: one JSON object, see `main`.
"""

from __future__ import annotations

import argparse
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


def read_vllm(arguments: list[str]) -> dict[str, Any]:
    """The parsed values of vLLM's API server, or {"error": what argparse said}."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return _parsed(lambda: parser.parse_args(arguments))


def read_lmcache(arguments: list[str]) -> dict[str, Any]:
    """The same for the LMCache MP server, whose module reads sys.argv."""
    from lmcache.v1.multiprocess import http_server

    sys.argv = ["http_server", *arguments]
    return _parsed(http_server.parse_args)


def _parsed(parse: Callable[[], argparse.Namespace]) -> dict[str, Any]:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return {key: _plain(value) for key, value in vars(parse()).items()}
    except SystemExit:
        return {"error": stderr.getvalue()}


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None | list | dict):
        return value
    return vars(value) if hasattr(value, "kv_connector") else str(value)


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
    """What vLLM makes of the command line of one engine, or {"error": why it refuses it}."""
    from tests.plan.real_configs import configure

    try:
        return configure(arguments)
    except (ValueError, TypeError, KeyError, SystemExit, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Prints what the parsers made of it, vLLM's environment variables, and configuration keys that nobody reads."""
    asked = json.load(sys.stdin)
    from vllm import envs

    answer = {
        "vllm": {name: read_vllm(arguments) for name, arguments in asked["vllm"].items()},
        "lmcache": {name: read_lmcache(arguments) for name, arguments in asked["lmcache"].items()},
        "unread": {name: unread_keys(name, keys) for name, keys in asked["keys"].items()},
        "stores": {name: read_store(content) for name, content in asked["stores"].items()},
        "offloading": [read_offloading(extra) for extra in asked["offloading"]],
        "configs": {name: configured(arguments) for name, arguments in asked["configs"].items()},
        "control": unread_keys("MooncakeConnector", ["num_workers", "no_such_key"]),
        "lmcache_connector": hasattr(importlib.import_module(LMCACHE_MODULE), "LMCacheMPConnector"),
        "environment": sorted(envs.environment_variables),
    }
    print("ANSWER " + json.dumps(answer, default=str))


if __name__ == "__main__":
    main()
