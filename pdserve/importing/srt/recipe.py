"""A recipe of srt-slurm (srtctl) with a vllm backend -> a launch.

Schema 1 has the roles spread over `resources` and `backend`; schema 2 has them under `roles`, and the engine under
`engine`. Both mean the same, so one reader asks for a value where either has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.errors import RecipeError
from pdserve.importing import environment
from pdserve.importing.command_line.flags import collected, flag
from pdserve.importing.command_line.installed_parser import LineReader
from pdserve.importing.command_line.parsed import as_parsed, line_of
from pdserve.importing.launch import EngineLaunch, Launch, Sourced
from pdserve.importing.named_versions import frameworks
from pdserve.importing.srt import dynamo, services
from pdserve.importing.srt.job import read_job
from pdserve.importing.srt.shorthands import NAMES, transfer_config
from pdserve.importing.tracked_tree import TrackedTree, whole
from pdserve.importing.yaml_tree import Tree
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
    """Whether the file looks like a recipe of srt-slurm."""
    top = tree.get("base") if tree.has("base") else tree.data
    return isinstance(top, dict) and bool(top.keys() & {"resources", "backend", "engine"}) and "meta" not in top


def launch(tree: Tree, lines: LineReader) -> Launch:
    """One variant of a file. Raises RecipeError for what is no deployment of vLLM."""
    tracked = TrackedTree(tree)
    version = tracked.take("schema")
    schema = 1 if version is None else whole(version.value)
    if schema not in FORMATS:
        raise RecipeError(
            f"schema {tree.get('schema')} of srt-slurm is not known",
            where=f"{tree.file}:{tree.line('schema')}",
            todo="schemas 1 and 2 are read",
        )
    engines = _engines(tree)
    for engine in engines.values():
        tracked.take(*engine, "type")
    name = tracked.take("name") or Sourced("imported", "name", 0)
    result = Launch(tree.file, FORMATS[schema], name, platform=_platform(tracked))
    result.devices_per_node = tracked.take("resources", "gpus_per_node") or Sourced(4, "srt-slurm's default", 0)
    result.engine_env = environment.carried(tracked.mapping("environment"), result, None)
    roles = [role for role in _ROLES if _present(tree, role)]
    for role in roles:
        result.roles[role] = _role(tracked, result, role, engines[role], lines)
    dynamo.read(tracked, result)
    _model(tracked, result)
    if not roles:
        raise RecipeError("no role has workers", where=f"{tree.file}:{tree.line('resources')}", todo=_NO_ROLE)
    services.read(tracked, result, dict.fromkeys(engines.values()))
    read_job(tracked, result)
    _leave(tracked, dict.fromkeys(engines.values()))
    result.notes.extend(tracked.notes)
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


def _platform(tracked: TrackedTree) -> Sourced:
    gpu = tracked.take("resources", "gpu_type")
    if gpu is None:
        return Sourced("cuda", "no resources.gpu_type", 0)
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
    if isinstance(listed, dict):
        line = tracked.tree.line("identity", "frameworks")
        result.frameworks = frameworks(listed, "identity.frameworks", line)
    image = tracked.take("model", "container")
    identity = tracked.take("identity", "container", "image")
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


def _role(tracked: TrackedTree, result: Launch, role: EngineRole, engine: Path, lines: LineReader) -> EngineLaunch:
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
    engines.env = environment.carried(variables, result, role)
    written = tracked.mapping(*args)
    shorthand = written.pop("connector", None)
    default = tracked.take(*engine, "connector")
    kept = []
    for key, value in written.items():
        if value.value is False:
            result.note(value, "srtctl passes no flag for `false`", "replaced")
        elif value.value is not None:
            kept.append((flag(f"--{key}", value.value, lines.names), value))
    given = collected(kept)
    others = {key: given.pop(key) for key in list(given) if dynamo.owns(key)}
    engines.line = line_of(given, variables)
    engines.args = {**as_parsed(given, engines.line, lines, result, engines.at), **others}
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
    engines: EngineLaunch, connector: Sourced | None, *, unset: bool, role: EngineRole, file: str
) -> Sourced | None:
    """The role's mapping: its flag, else its connector, else that of the engine, which is nixl unless it is null."""
    given = engines.args.pop("kv-transfer-config", None)
    if given is not None:
        return given
    if connector is None:
        nixl = unset and role != "aggregated"
        return Sourced(transfer_config("nixl", role), "srt-slurm's default connector", 0) if nixl else None
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
    "dp_launch_mode": "parallel.load_balancing says which API servers an instance has: one, if no flag asks for more",
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


def _leave(tracked: TrackedTree, engines: Iterable[Path]) -> None:
    for engine in engines:
        for key, why in _ENGINE_REPLACED.items():
            tracked.leave((*engine, key), why, "replaced")
        for key, why in _ENGINE_LOST.items():
            tracked.leave((*engine, key), why, "served")
        if isinstance(tracked.tree.get(*engine), str):
            tracked.take(*engine)
    for theirs, _ in _ROLES.values():
        tracked.leave(("roles", theirs, "engine"), "the engine of all roles is named at the top", "replaced")
    for path, why in _REPLACED.items():
        tracked.leave(path, why, "replaced")
    for path, why in _LOST.items():
        tracked.leave(path, why, "served")
    for path, why in _UNUSED.items():
        tracked.leave(path, why, "unused")
    tracked.leave_rest("pdserve does not know this key", "served")
