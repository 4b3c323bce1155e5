"""A recipe of srt-slurm (srtctl) with a vllm backend -> a launch.

Schema 1 has the roles spread over `resources` and `backend`; schema 2 has them under `roles`, and the engine under
`engine`. Both mean the same, so one reader asks for a value where either has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pdserve.errors import RecipeError
from pdserve.importing import cache_servers, environment, srt_dynamo
from pdserve.importing.command_line import ImportedFlag, flag, from_argv, merge_flags
from pdserve.importing.launch import Effect, EngineLaunch, Launch, SourcedValue
from pdserve.importing.yaml_tree import TrackedTree, Tree, whole_number
from pdserve.installed.versions import PACKAGES
from pdserve.recipe.load.problems import Path
from pdserve.roles import EngineRole

OPTIONS = ("--variant",)
"""What chooses among the deployments of a file."""
FORMATS = {1: "srt-slurm, schema 1", 2: "srt-slurm, schema 2"}
_ROLES: Mapping[EngineRole, tuple[str, str]] = {
    "prefill": ("prefill", "prefill"),
    "decode": ("decode", "decode"),
    "aggregated": ("agg", "aggregated"),
}
"""Our role -> its name in `resources` and `roles`, and in `backend`."""
_PLACED = "pdserve places instances on devices in order, and fills a node first"


def matches(tree: Tree) -> bool:
    """Return whether the file looks like a recipe of srt-slurm."""
    top = tree.get("base") if tree.has("base") else tree.data
    return isinstance(top, dict) and bool(top.keys() & {"resources", "backend", "engine"}) and "meta" not in top


def launch(tree: Tree) -> Launch:
    """Read one variant of a file. Raises RecipeError for what is no deployment of vLLM."""
    tracked = TrackedTree(tree)
    version = tracked.take("schema")
    schema = 1 if version is None else whole_number(version.value)
    if schema not in FORMATS:
        raise RecipeError(
            f"schema {tree.get('schema')} of srt-slurm is not known",
            where=f"{tree.file}:{tree.line('schema')}",
            todo="schemas 1 and 2 are read",
        )
    engines = _engines(tree)
    for engine in engines.values():
        tracked.take(*engine, "type")
    name = tracked.take("name") or SourcedValue("imported", "name", 0)
    result = Launch(tree.file, FORMATS[schema], name, platform=_platform(tracked))
    result.devices_per_node = tracked.take("resources", "gpus_per_node") or SourcedValue(4, "srt-slurm's default", 0)
    result.engine_env = environment.carry_over(tracked.mapping("environment"), result, None)
    roles = [role for role in _ROLES if _present(tree, role)]
    for role in roles:
        result.roles[role] = _role(tracked, result, role, engines[role])
    srt_dynamo.read(tracked, result)
    _model(tracked, result)
    if not roles:
        raise RecipeError("no role has workers", where=f"{tree.file}:{tree.line('resources')}", todo=_NO_ROLE)
    _read_services(tracked, result, dict.fromkeys(engines.values()))
    read_job(tracked, result)
    _leave(tracked, dict.fromkeys(engines.values()))
    result.notes.extend(tracked.notes)
    return result


_NO_ROLE = "srt-slurm needs prefill and decode, or agg, with a number of workers"


def has_roles(tree: Tree) -> bool:
    """Return whether the document has engines to start. The `base` of a file with overrides may have none."""
    return any(_present(tree, role) for role in _ROLES)


def _engines(tree: Tree) -> dict[EngineRole, Path]:
    """Find where the engine of each role is described: one for all, or one in each role (schema 2)."""
    top: Path = ("engine",) if tree.has("engine") else ("backend",)
    own: dict[EngineRole, Path] = {
        role: ("roles", theirs, "engine") for role, (theirs, _) in _ROLES.items() if tree.has("roles", theirs, "engine")
    }
    for path in own.values() if own and not tree.has(*top) else (top,):
        value = tree.get(*path)
        kind = value if isinstance(value, str) else tree.get(*path, "type")
        if kind != "vllm":
            raise RecipeError(
                f"the engine is {kind or 'sglang, by default'}",
                where=f"{tree.file}:{tree.line(*path)}",
                cause="pdserve serves vLLM only",
                todo="import a recipe whose engine is vllm",
            )
    return {role: top if tree.has(*top) else own.get(role, top) for role in _ROLES}


def _platform(tracked: TrackedTree) -> SourcedValue:
    gpu = tracked.take("resources", "gpu_type")
    if gpu is None:
        return SourcedValue("cuda", "no resources.gpu_type", 0)
    return gpu.of("rocm" if str(gpu.value).lower().startswith("mi") else "cuda")


def _model(tracked: TrackedTree, result: Launch) -> None:
    path = tracked.take("model", "path")
    repo = tracked.take("identity", "model", "repo")
    result.revision = tracked.take("identity", "model", "revision")
    text = str(path.value) if path is not None else ""
    if path is None:
        result.model_id = repo
    elif text.startswith("hf:"):
        result.model_id = path.of(text[3:])
    elif text.startswith("/"):
        result.model_path, result.revision = path, None
    else:
        _alias(result, path, repo)
    listed = tracked.tree.get("identity", "frameworks")
    for name in PACKAGES if isinstance(listed, dict) else ():
        if name in listed:
            at = tracked.at("identity", "frameworks", name)
            result.frameworks[name] = at.of(str(at.value))
    image = tracked.take("model", "container")
    identity = tracked.take("identity", "container", "image")
    result.image = image
    if image is not None and "/" not in str(image.value) and ":" not in str(image.value):
        result.image = identity or image
        known = identity.value if identity is not None else "taken as the image's name"
        result.note(image, f"an alias of the site (containers of its srtslurm.yaml): {known}", "confirm")


def _alias(result: Launch, path: SourcedValue, repo: SourcedValue | None) -> None:
    """Carry over a name that the site's srtslurm.yaml resolves. Of what it may be, the likeliest is an id of the
    hub."""
    names = [at for engines in result.roles.values() if (at := engines.args.get("served-model-name")) is not None]
    served = next((at for at in names if "/" in str(at.value)), None)
    result.model_id = repo or (path if "/" in str(path.value) else served or path)
    why = f"{path.value} is an alias of the site (model_paths of its srtslurm.yaml)"
    likely = f"{result.model_id.key} has {result.model_id.value}"
    result.note(path, f"{why}; {likely}. A folder: --unset model.id --set model.path=/...", "confirm")


def _present(tree: Tree, role: EngineRole) -> bool:
    theirs, mode = _ROLES[role]
    if tree.has("roles"):
        return isinstance(tree.get("roles", theirs), dict)
    return bool(tree.get("resources", f"{theirs}_workers")) or bool(tree.get("backend", "vllm_config", mode))


def _role(tracked: TrackedTree, result: Launch, role: EngineRole, engine: Path) -> EngineLaunch:
    theirs, mode = _ROLES[role]
    at: Path
    workers: Path
    gpus: Path
    env: Path
    args: Path
    if tracked.tree.has("roles"):
        at = ("roles", theirs)
        workers, gpus, env, args = (*at, "workers"), (*at, "gpus"), (*at, "env"), (*at, "args")
        tracked.leave((*at, "nodes"), _PLACED, "replaced")
        tracked.leave((*at, "kv_events"), _EVENTS, "replaced")
        for key in ("critical", "restart"):
            tracked.leave((*at, key), "on_node_loss and restart decide what follows a death", "replaced")
        _image_of_role(tracked, result, at)
        tracked.leave((*at, "srun_options"), "for this role only; container.options holds for all", "confirm")
        tracked.leave((*at, "sidecar"), "a part of Dynamo", "unused")
    else:
        at = ("backend", "vllm_config", mode)
        workers, gpus = ("resources", f"{theirs}_workers"), ("resources", f"gpus_per_{theirs}")
        env, args = ("backend", f"{mode}_environment"), at
        tracked.leave(("resources", f"{theirs}_nodes"), _PLACED, "replaced")
    engines = EngineLaunch(tracked.at(*at), tracked.take(*workers) or tracked.at(*at).of(1), tracked.take(*gpus))
    variables = tracked.mapping(*env)
    engines.env = environment.carry_over(variables, result, role)
    written = tracked.mapping(*args)
    shorthand = written.pop("connector", None)
    default = tracked.take(*engine, "connector")
    kept = []
    for key, value in written.items():
        if value.value is False:
            result.note(value, "srtctl passes no flag for `false`", "replaced")
        elif value.value is not None:
            kept.append((flag(f"--{key}", value.value), value))
    given = merge_flags(kept)
    others = {key: given.pop(key) for key in list(given) if srt_dynamo.is_dynamos_flag(key)}
    engines.args = {**given, **others}
    engines.kv_transfer = _transfer(
        engines,
        shorthand or default,
        unset=not tracked.tree.has(*engine, "connector"),
        role=role,
        file=tracked.tree.file,
    )
    return engines


def _image_of_role(tracked: TrackedTree, result: Launch, at: Path) -> None:
    image = tracked.take(*at, "container")
    if image is not None and image.value != tracked.tree.get("model", "container"):
        result.note(image, "a recipe has one image for all engines: that of model.container is used", "served")


def _transfer(
    engines: EngineLaunch, connector: SourcedValue | None, *, unset: bool, role: EngineRole, file: str
) -> SourcedValue | None:
    """Return the role's mapping: its flag, else its connector, else that of the engine, which is nixl unless it is
    null."""
    given = engines.args.pop("kv-transfer-config", None)
    if given is not None:
        return given
    if connector is None:
        nixl = unset and role != "aggregated"
        return SourcedValue(transfer_config("nixl", role), "srt-slurm's default connector", 0) if nixl else None
    text = connector.value
    if isinstance(text, str) and text.lower() in ("none", "null"):
        return None
    known = transfer_config(text, role) if isinstance(text, str) else None
    if known is None and isinstance(text, str) and text.isidentifier():
        raise RecipeError(
            f"the connector {text} of role {role} is not known",
            where=f"{file}:{connector.line}",
            cause=f"srtctl makes its mapping at the start; known are {', '.join(NAMES)} (moriio: prefill and decode)",
            todo="give each role its --kv-transfer-config (kv-transfer-config under args), and import again",
        )
    return connector.of(known if known is not None else flag("--kv-transfer-config", text).value)


_EVENTS = "for event-driven routing: proxy.routing.<role>.kind: kv_events publishes them by itself"
_LEFT: Mapping[tuple[Effect, str], tuple[str, ...]] = {
    ("unused", "a measurement; a recipe describes what is served"): ("benchmark", "profiling", "post_eval"),
    ("unused", "what srtctl records of a run; pdserve keeps a run directory"): (
        "telemetry",
        "observability",
        "reporting",
        "output",
        "enable_config_dump",
    ),
    ("unused", "Dynamo and its services; pdserve has a proxy of its own (section proxy)"): (
        "dynamo",
        "frontend",
        "infra",
    ),
    ("unused", "vLLM reads it from the checkpoint"): ("model.precision",),
    ("unused", "a copy on each node's disk; pdserve fetches a model.id by itself"): ("model.stage_dir",),
    ("unused", "what the aliases of the site, and its image, stand for"): ("identity",),
    ("replaced", _PLACED): ("resources.spread_workers",),
    ("replaced", "the job has nodes of one kind"): ("resources.het_jobs",),
    ("served", "commands on each host, outside of the container: run them before `pdserve up`"): ("host_setup",),
}
"""Effect and reason -> the keys of a file that are not carried over."""
_LEFT_OF_ENGINES: Mapping[tuple[Effect, str], tuple[str, ...]] = {
    ("replaced", _PLACED): (
        "allow_prefill_decode_colocation",
        "allow_prefill_decode_colocation_across_nodes",
    ),
    ("replaced", "parallel.load_balancing says which API servers an instance has: one, if no flag asks for more"): (
        "dp_launch_mode",
    ),
    ("replaced", "pdserve gives each engine its devices"): ("set_cuda_visible_devices", "set_visible_devices"),
    ("replaced", _EVENTS): ("kv_events_config",),
    ("replaced", "see served-model-name of the roles"): ("served_model_name",),
    ("served", "shadow engines of Dynamo; restart.policy starts a dead engine anew, without its weights"): (
        "failover",
    ),
    ("served", "a recipe starts vLLM's own server"): ("vllm_serve_binary",),
}


def _leave(tracked: TrackedTree, engines: Iterable[Path]) -> None:
    for engine in engines:
        for (effect, why), keys in _LEFT_OF_ENGINES.items():
            for key in keys:
                tracked.leave((*engine, key), why, effect)
        if isinstance(tracked.tree.get(*engine), str):
            tracked.take(*engine)
    for theirs, _ in _ROLES.values():
        tracked.leave(("roles", theirs, "engine"), "the engine of all roles is named at the top", "replaced")
    for (effect, why), keys in _LEFT.items():
        for key in keys:
            tracked.leave(tuple(key.split(".")), why, effect)
    tracked.leave_rest("pdserve does not know this key", "served")


_DYNAMO_SERVICES = ("etcd", "nats")


def _read_services(tracked: TrackedTree, launch: Launch, engines: Iterable[Path]) -> None:
    """Read the sections `mooncake_store` and `lmcache`. `engines`: where the file describes its engines."""
    for engine in engines:
        store = (*engine, "mooncake_kv_store")
        if not isinstance(tracked.tree.get(*store), dict):
            continue
        tracked.leave((*store, "container"), "the master runs in the engines' container", "replaced")
        launch.engine_env.update(environment.carry_over(tracked.mapping(*store, "env"), launch, None))
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
    if kind in _DYNAMO_SERVICES:
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


def _words(tracked: TrackedTree, path: Path) -> list[tuple[SourcedValue, ImportedFlag | str]]:
    """Return the flags of a list of words, with their place."""
    at = tracked.take(*path)
    words = at.value if at is not None and isinstance(at.value, list) else []
    return [(at, item) for _, item in from_argv([str(word) for word in words])] if at is not None else []


_SLURM = {"time_limit": "time", "account": "account", "partition": "partition"}
_DIRECTIVES = ("time", "account", "partition", "qos", "reservation", "constraint")
_FILE_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")
_DEPENDENCIES = "vllm-container-deps.sh"
"""A script of srt-slurm's own (c88ef731, configs/patches): numactl for numa-bind, msgpack for Dynamo, and a patch of
vLLM for numa-bind (vllm#41098, merged in April 2026, thus in all that pdserve supports)."""
_NUMACTL = (["apt-get", "-y", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "numactl"])


def read_job(tracked: TrackedTree, launch: Launch) -> None:
    """Read the sections `slurm` and `container`, and the timeout of an engine."""
    for key, ours in _SLURM.items():
        if (at := tracked.take("slurm", key)) is not None:
            launch.slurm[ours] = at.of(str(at.value))
    options: list[SourcedValue] = []
    for key, at in tracked.mapping("sbatch_directives").items():
        if key in _DIRECTIVES:
            launch.slurm[key] = at.of(str(at.value))
        elif key == "exclude":
            launch.exclude_nodes.extend(at.of(name) for name in str(at.value).split(","))
        else:
            options.append(at.of(_option(key, at.value)))
    if options:
        launch.slurm["options"] = options
    launch.container["kind"] = SourcedValue("pyxis", "srt-slurm starts its containers by pyxis", 0)
    if srun := [at.of(_option(key, at.value)) for key, at in tracked.mapping("srun_options").items()]:
        launch.container["options"] = srun
    _mounts(tracked, launch)
    _setup(tracked, launch)
    attempts, interval = tracked.take("health_check", "max_attempts"), tracked.take("health_check", "interval_seconds")
    if attempts is not None and (number := whole_number(attempts.value)):
        pause = whole_number(interval.value) if interval is not None else 10
        launch.engine_seconds = attempts.of(number * (pause or 10))


def _option(name: str, value: object) -> str:
    return f"--{name}" if value in (None, "") else f"--{name}={value}"


def _mounts(tracked: TrackedTree, launch: Launch) -> None:
    mounts: list[SourcedValue] = []
    wanted = [at.of(f"{source}:{at.value}") for source, at in tracked.mapping("container_mounts").items()]
    extra = tracked.take("extra_mount")
    if extra is not None and isinstance(extra.value, list):
        wanted += [tracked.at("extra_mount", index) for index in range(len(extra.value))]
    for at in wanted:
        parts = str(at.value).split(":")
        if len(parts) in (2, 3) and all(part.startswith("/") and "$" not in part for part in parts[:2]):
            mounts.append(at)
        else:
            why = "a path of the site: add it to container.mounts, as SRC:DST with absolute paths"
            launch.note(at, why, "confirm")
    if mounts:
        launch.container["mounts"] = mounts


def _setup(tracked: TrackedTree, launch: Launch) -> None:
    script = tracked.take("setup_script")
    if script is None:
        return
    if script.value != _DEPENDENCIES:
        # What is no file name may hold anything, a secret among it.
        name = script.value if _FILE_NAME.fullmatch(str(script.value)) else "FILE"
        why = f"what it does is not known: mount it, and add it to the recipe: setup: [[bash, /configs/{name}]]"
        launch.note(script, why, "served")
    elif any(name == "numa-bind" for engines in launch.roles.values() for name in engines.args):
        launch.setup.extend(script.of(list(words)) for words in _NUMACTL)
        why = "setup installs numactl, which numa-bind needs; msgpack is for Dynamo, and its patch is vllm#41098"
        launch.note(script, why, "replaced")
    else:
        launch.note(script, "it installs numactl and msgpack, for numa-bind and for Dynamo; neither is here", "unused")


_OF_ALL_ROLES: Mapping[str, Mapping[str, Any]] = {
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "lmcache-mp": {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"},
}
_MORIIO = "moriio"
_MORIIO_SIDES: Mapping[EngineRole, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""srtctl refuses it for an aggregated role (its docs/vllm-router.md, as of September 2026)."""

NAMES = (*_OF_ALL_ROLES, _MORIIO)


def transfer_config(name: str, role: EngineRole) -> Mapping[str, Any] | None:
    """Return the mapping that srtctl gives an engine of this role, without the addresses and ports that it fills in at
    the start. None for a name that is not known, or not for this role."""
    if name.lower() == _MORIIO and (side := _MORIIO_SIDES.get(role)):
        return {
            "kv_connector": "MoRIIOConnector",
            "kv_role": side,
            "kv_connector_extra_config": {"read_mode": True},
        }
    return _OF_ALL_ROLES.get(name.lower())
