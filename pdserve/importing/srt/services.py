"""What runs beside the engines of an srt-slurm recipe: a Mooncake store, LMCache servers, and what Dynamo needs.

In schema 1 the store is `backend.mooncake_kv_store`; in schema 2 it is an entry of `services`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdserve.importing import cache_servers, environment
from pdserve.importing.command_line.flags import ImportedFlag, from_argv
from pdserve.importing.launch import Launch, Sourced
from pdserve.importing.tracked_tree import TrackedTree
from pdserve.recipe.load.problems import Path

_DYNAMO = ("etcd", "nats")


def read(tracked: TrackedTree, launch: Launch, engines: Iterable[Path]) -> None:
    """The sections `mooncake_store` and `lmcache`. `engines`: where the file describes its engines."""
    for engine in engines:
        store = (*engine, "mooncake_kv_store")
        if not isinstance(tracked.tree.get(*store), dict):
            continue
        tracked.leave((*store, "container"), "the master runs in the engines' container", "replaced")
        launch.engine_env.update(environment.carried(tracked.mapping(*store, "env"), launch, None))
        if (lease := tracked.take(*store, "default_kv_lease_ttl_ms")) is not None:
            launch.store.setdefault("extra_args", {})["default_kv_lease_ttl"] = lease
        _store(tracked, launch, (*store, "store_config"), (*store, "master_extra_args"))
    services = tracked.tree.get("services")
    for index, service in enumerate(services if isinstance(services, list) else ()):
        if isinstance(service, dict):
            _service(tracked, launch, ("services", index), service)


def _service(tracked: TrackedTree, launch: Launch, path: Path, service: dict[str, Any]) -> None:
    kind = str(service.get("type", service.get("name", "generic")))
    for key in ("name", "type"):
        tracked.take(*path, key)
    if kind in _DYNAMO:
        tracked.leave(path, "a service of Dynamo", "unused")
    elif kind == "mooncake-master":
        tracked.leave((*path, "container"), "the master runs in the engines' container", "replaced")
        tracked.leave((*path, "placement"), "the master runs on the first node", "replaced")
        why = "a NIC for each GPU: here Mooncake chooses one of device_name for each rank; look that it is a near one"
        tracked.leave((*path, "options", "device_names_by_gpu"), why, "confirm")
        _store(tracked, launch, (*path, "options", "store_config"), (*path, "args"))
    elif kind == "lmcache-server":
        _lmcache(tracked, launch, path)
    else:
        tracked.leave(path, f"a recipe has no process of the type {kind}", "served")


def _store(tracked: TrackedTree, launch: Launch, config: Path, master: Path) -> None:
    cache_servers.read_store_file(tracked.mapping(*config), launch)
    cache_servers.read_master(_words(tracked, master), launch)


def _lmcache(tracked: TrackedTree, launch: Launch, path: Path) -> None:
    words = _words(tracked, (*path, "args"))
    tracked.leave((*path, "placement"), "a server runs on each node of the roles that use it", "replaced")
    tracked.leave((*path, "env"), "the server gets the hash seed of the engines, and little else", "replaced")
    tracked.leave((*path, "preamble"), "limits are those of the agent; preflight checks memlock", "replaced")
    cache_servers.read_lmcache(words, launch)


def _words(tracked: TrackedTree, path: Path) -> list[tuple[Sourced, ImportedFlag | str]]:
    """The flags of a list of words, with their place."""
    at = tracked.take(*path)
    words = at.value if at is not None and isinstance(at.value, list) else []
    return [(at, item) for _, item in from_argv([str(word) for word in words])] if at is not None else []
