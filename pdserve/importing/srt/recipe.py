"""A recipe of srt-slurm (srtctl) with a vllm backend -> a launch.

Schema 1 has the roles spread over `resources` and `backend`; schema 2 has them under `roles`, and the engine under
`engine`. Both mean the same, so one reader asks for a value where either has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.errors import RecipeError
from pdserve.importing import environment
from pdserve.importing.flags import collected, flag
from pdserve.importing.launch import EngineLaunch, Launch, Sourced
from pdserve.importing.named_versions import frameworks
from pdserve.importing.reading import SourceReading, whole
from pdserve.importing.srt import dynamo, services
from pdserve.importing.srt.job import read_job
from pdserve.importing.yaml_tree import Tree
from pdserve.recipe.load.problems import Path
from pdserve.roles import EngineRole

FORMATS = {1: "srt-slurm, schema 1", 2: "srt-slurm, schema 2"}
_ROLES: Mapping[EngineRole, tuple[str, str]] = {
    "prefill": ("prefill", "prefill"),
    "decode": ("decode", "decode"),
    "aggregated": ("agg", "aggregated"),
}
"""Our role -> its name in `resources` and `roles`, and in `backend`."""
_SHORTHANDS = {
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "lmcache-mp": {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"},
}
_PLACED = "pdserve places instances on devices in order, and fills a node first"


def matches(tree: Tree) -> bool:
    """Whether the file looks like a recipe of srt-slurm."""
    top = tree.get("base") if tree.has("base") else tree.data
    return isinstance(top, dict) and bool(top.keys() & {"resources", "backend", "engine"}) and "meta" not in top


def launch(tree: Tree) -> Launch:
    """One variant of a file. Raises RecipeError for what is no deployment of vLLM."""
    reading = SourceReading(tree)
    version = reading.take("schema")
    schema = 1 if version is None else whole(version.value)
    if schema not in FORMATS:
        raise RecipeError(
            f"schema {tree.get('schema')} of srt-slurm is not known",
            where=f"{tree.file}:{tree.line('schema')}",
            todo="schemas 1 and 2 are read",
        )
    engines = _engines(tree)
    for engine in engines.values():
        reading.take(*engine, "type")
    name = reading.take("name") or Sourced("imported", "name", 0)
    result = Launch(tree.file, FORMATS[schema], name, platform=_platform(reading))
    result.devices_per_node = reading.take("resources", "gpus_per_node") or Sourced(4, "srt-slurm's default", 0)
    result.engine_env = environment.carried(reading.mapping("environment"), result, None)
    roles = [role for role in _ROLES if _present(tree, role)]
    for role in roles:
        result.roles[role] = _role(reading, result, role, engines[role])
    dynamo.read(reading, result)
    _model(reading, result)
    if not roles:
        raise RecipeError("no role has workers", where=f"{tree.file}:{tree.line('resources')}", todo=_NO_ROLE)
    services.read(reading, result, dict.fromkeys(engines.values()))
    read_job(reading, result)
    _leave(reading, dict.fromkeys(engines.values()))
    result.notes.extend(reading.notes)
    return result


_NO_ROLE = "srt-slurm needs prefill and decode, or agg, with a number of workers"


def has_roles(tree: Tree) -> bool:
    """Whether the document has engines to start. The `base` of a file with overrides may have none."""
    return any(_present(tree, role) for role in _ROLES)


def _engines(tree: Tree) -> dict[EngineRole, Path]:
    """Where the engine of each role is described: one for all, or one in each role (schema 2)."""
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


def _platform(reading: SourceReading) -> Sourced:
    gpu = reading.take("resources", "gpu_type")
    if gpu is None:
        return Sourced("cuda", "no resources.gpu_type", 0)
    return gpu.of("rocm" if str(gpu.value).lower().startswith("mi") else "cuda")


def _model(reading: SourceReading, result: Launch) -> None:
    path = reading.take("model", "path")
    repo = reading.take("identity", "model", "repo")
    result.revision = reading.take("identity", "model", "revision")
    text = str(path.value) if path is not None else ""
    if path is None:
        result.model_id = repo
    elif text.startswith("hf:"):
        result.model_id = path.of(text[3:])
    elif text.startswith("/"):
        result.model_path, result.revision = path, None
    else:
        _alias(result, path, repo)
    listed = reading.tree.get("identity", "frameworks")
    if isinstance(listed, dict):
        line = reading.tree.line("identity", "frameworks")
        result.frameworks = frameworks(listed, "identity.frameworks", line)
    image = reading.take("model", "container")
    identity = reading.take("identity", "container", "image")
    result.image = image
    if image is not None and "/" not in str(image.value) and ":" not in str(image.value):
        result.image = identity or image
        known = identity.value if identity is not None else "taken as the image's name"
        result.note(image, f"an alias of the site (containers of its srtslurm.yaml): {known}", "confirm")


def _alias(result: Launch, path: Sourced, repo: Sourced | None) -> None:
    """A name that the site's srtslurm.yaml resolves. Of what it may be, the likeliest is an id of the hub."""
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


def _role(reading: SourceReading, result: Launch, role: EngineRole, engine: Path) -> EngineLaunch:
    theirs, mode = _ROLES[role]
    at: Path
    workers: Path
    gpus: Path
    env: Path
    args: Path
    if reading.tree.has("roles"):
        at = ("roles", theirs)
        workers, gpus, env, args = (*at, "workers"), (*at, "gpus"), (*at, "env"), (*at, "args")
        reading.leave((*at, "nodes"), _PLACED, "replaced")
        reading.leave((*at, "kv_events"), _EVENTS, "replaced")
        for key in ("critical", "restart"):
            reading.leave((*at, key), "on_node_loss and restart decide what follows a death", "replaced")
        _image_of_role(reading, result, at)
        reading.leave((*at, "srun_options"), "for this role only; container.options holds for all", "confirm")
        reading.leave((*at, "sidecar"), "a part of Dynamo", "unused")
    else:
        at = ("backend", "vllm_config", mode)
        workers, gpus = ("resources", f"{theirs}_workers"), ("resources", f"gpus_per_{theirs}")
        env, args = ("backend", f"{mode}_environment"), at
        reading.leave(("resources", f"{theirs}_nodes"), _PLACED, "replaced")
    engines = EngineLaunch(reading.at(*at), reading.take(*workers) or reading.at(*at).of(1), reading.take(*gpus))
    engines.env = environment.carried(reading.mapping(*env), result, role)
    written = reading.mapping(*args)
    shorthand = written.pop("connector", None)
    default = reading.take(*engine, "connector")
    kept = []
    for key, value in written.items():
        if value.value is False:
            result.note(value, "srtctl passes no flag for `false`", "replaced")
        elif value.value is not None:
            kept.append((flag(f"--{key}", value.value), value))
    engines.args = collected(kept)
    engines.kv_transfer = _transfer(
        engines,
        shorthand or default,
        unset=not reading.tree.has(*engine, "connector"),
        role=role,
        file=reading.tree.file,
    )
    return engines


def _image_of_role(reading: SourceReading, result: Launch, at: Path) -> None:
    image = reading.take(*at, "container")
    if image is not None and image.value != reading.tree.get("model", "container"):
        result.note(image, "a recipe has one image for all engines: that of model.container is used", "served")


def _transfer(
    engines: EngineLaunch, connector: Sourced | None, *, unset: bool, role: EngineRole, file: str
) -> Sourced | None:
    """The role's mapping: its flag, else its connector, else that of the engine, which is nixl unless it is null."""
    given = engines.args.pop("kv-transfer-config", None)
    if given is not None:
        return given
    if connector is None:
        nixl = unset and role != "aggregated"
        return Sourced(_SHORTHANDS["nixl"], "srt-slurm's default connector", 0) if nixl else None
    text = connector.value
    if isinstance(text, str) and text.lower() in ("none", "null"):
        return None
    known = _SHORTHANDS.get(text.lower()) if isinstance(text, str) else None
    if known is None and isinstance(text, str) and text.isidentifier():
        raise RecipeError(
            f"the connector {text} is not known",
            where=f"{file}:{connector.line}",
            cause=f"srtctl makes its mapping at the start; known are {', '.join(_SHORTHANDS)}",
            todo="give each role its --kv-transfer-config (kv-transfer-config under args), and import again",
        )
    return connector.of(known if known is not None else flag("--kv-transfer-config", text).value)


_EVENTS = "for event-driven routing: proxy.routing.<role>.kind: kv_events publishes them by itself"
_BENCHMARK = "a measurement; a recipe describes what is served"
_DYNAMO = "Dynamo and its services; pdserve has a proxy of its own (section proxy)"
_REPORTS = "what srtctl records of a run; pdserve keeps a run directory"
_UNUSED: Mapping[Path, str] = {
    ("benchmark",): _BENCHMARK,
    ("profiling",): _BENCHMARK,
    ("post_eval",): _BENCHMARK,
    ("telemetry",): _REPORTS,
    ("observability",): _REPORTS,
    ("reporting",): _REPORTS,
    ("output",): _REPORTS,
    ("enable_config_dump",): _REPORTS,
    ("dynamo",): _DYNAMO,
    ("frontend",): _DYNAMO,
    ("infra",): _DYNAMO,
    ("model", "precision"): "vLLM reads it from the checkpoint",
    ("model", "stage_dir"): "a copy on each node's disk; pdserve fetches a model.id by itself",
    ("identity", "frameworks"): "what the image contains; preflight reads the versions that are installed",
    ("identity",): "what the aliases of the site stand for",
}
_REPLACED: Mapping[Path, str] = {
    ("resources", "spread_workers"): _PLACED,
    ("resources", "het_jobs"): "the job has nodes of one kind",
}
_ENGINE_REPLACED: Mapping[str, str] = {
    "allow_prefill_decode_colocation": _PLACED,
    "allow_prefill_decode_colocation_across_nodes": _PLACED,
    "dp_launch_mode": "pdserve starts one API server an instance, in front of all of its data-parallel ranks",
    "set_cuda_visible_devices": "pdserve gives each engine its devices",
    "set_visible_devices": "pdserve gives each engine its devices",
    "kv_events_config": _EVENTS,
    "served_model_name": "see served-model-name of the roles",
}


_LOST: Mapping[Path, str] = {
    ("host_setup",): "commands on each host, outside of the container: run them before `pdserve up`",
}
_ENGINE_LOST: Mapping[str, str] = {
    "failover": "shadow engines of Dynamo; restart.policy starts a dead engine anew, without its weights",
    "vllm_serve_binary": "a recipe starts vLLM's own server",
}


def _leave(reading: SourceReading, engines: Iterable[Path]) -> None:
    for engine in engines:
        for key, why in _ENGINE_REPLACED.items():
            reading.leave((*engine, key), why, "replaced")
        for key, why in _ENGINE_LOST.items():
            reading.leave((*engine, key), why, "served")
        if isinstance(reading.tree.get(*engine), str):
            reading.take(*engine)
    for theirs, _ in _ROLES.values():
        reading.leave(("roles", theirs, "engine"), "the engine of all roles is named at the top", "replaced")
    for path, why in _REPLACED.items():
        reading.leave(path, why, "replaced")
    for path, why in _LOST.items():
        reading.leave(path, why, "served")
    for path, why in _UNUSED.items():
        reading.leave(path, why, "unused")
    reading.leave_rest("pdserve does not know this key", "served")
