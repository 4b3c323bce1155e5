"""A launch -> a recipe as data, with the origin of each value beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pdserve.errors import RecipeError
from pdserve.importing import connectors
from pdserve.importing.launch import Draft, Effect, EngineLaunch, Launch, SourcedValue
from pdserve.importing.yaml_tree import whole_number
from pdserve.recipe.base import as_name
from pdserve.recipe.connectors.registry import NIXL_PUSH, REFUSED
from pdserve.recipe.flags import where_instead
from pdserve.recipe.load import show
from pdserve.recipe.load.environment import escape
from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import LoadBalancing
from pdserve.roles import EngineRole

_LMCACHE = "LMCacheMPConnector"
_JOB = "${SLURM_JOB_ID:-local}"


def draft(launch: Launch) -> Draft:
    """Draft the recipe of a launch. Raises RecipeError where the launch has no way from prefill to decode."""
    return _Writer(launch).draft()


class _Writer:
    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.document: dict[str, Any] = {}
        self.origins: dict[Path, str] = {}
        self.note = launch.note

    def draft(self) -> Draft:
        launch = self.launch
        self.put(("schema",), 1)
        name = str(launch.name.value)
        self.put(("name",), launch.name.of(as_name(name) or "imported"))
        self.put(("description",), launch.name.of(f"{name}, from {launch.format}"))
        self.put(("status",), "untested")
        self.put(("platform",), launch.platform)
        self.put(("devices_per_node",), launch.devices_per_node)
        self.put(("image",), launch.image)
        self.put(("mode",), "aggregated" if "aggregated" in launch.roles else "disaggregated")
        self._model()
        self.put(("setup",), launch.setup)
        self._hash_seed()
        self.put(("engine", "env"), launch.engine_env)
        self._same_length()
        for role, engines in launch.roles.items():
            self._role(role, engines)
        self._connectors()
        self.put(("lmcache",), launch.lmcache)
        self.put(("mooncake_store",), launch.store)
        self.put(("timeouts", "engine_seconds"), launch.engine_seconds)
        self.put(("exclude_nodes",), launch.exclude_nodes)
        self.put(("slurm",), launch.slurm)
        if launch.image is not None:
            self.put(("container",), launch.container)
        return Draft(self.document, self.origins, tuple(launch.notes), launch.file, launch.format)

    def put(self, path: Path, value: Any) -> None:
        """Set a value, or a mapping or list of them. None, and what is empty, is left out."""
        if isinstance(value, dict):
            for key, item in value.items():
                self.put((*path, key), item)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.put((*path, index), item)
        elif isinstance(value, SourcedValue):
            self.set(path, value.value)
            if value.value is not None:
                self.origins[path] = str(value)
        else:
            self.set(path, value)

    def set(self, path: Path, value: Any) -> None:
        """Set a value as it is, whatever it holds; None is left out."""
        if value is None:
            return
        into: Any = self.document
        for here, following in pairwise(path):
            into = into.setdefault(here, [] if isinstance(following, int) else {})
        if isinstance(into, list):
            into.append(_written(value))
        else:
            into[path[-1]] = _written(value)

    def _model(self) -> None:
        launch = self.launch
        self.put(("model", "path"), launch.model_path)
        self.put(("model", "id"), None if launch.model_path else launch.model_id)
        self.put(("model", "revision"), launch.revision)
        names = [
            at for engines in launch.roles.values() if (at := engines.args.pop("served-model-name", None)) is not None
        ]
        served = next(iter(names), launch.served_name)
        where = launch.model_path or launch.model_id
        if served is None and where is not None:
            served = SourcedValue(str(where.value).rstrip("/").rpartition("/")[2], f"end of {where.key}", where.line)
        if served is not None:
            first = served.value[0] if isinstance(served.value, list) and served.value else served.value
            self.put(("model", "served_name"), served.of(str(first)))
            for other in names:
                if other.value != served.value:
                    self.note(other, f"clients use one name: {first}", "served")
            if isinstance(served.value, list) and len(served.value) > 1:
                self.note(served, f"clients use one name: {first}", "served")

    def _hash_seed(self) -> None:
        at = self.launch.hash_seed
        if at is None:
            return
        self.put(("engine", "hash_seed"), at.of(whole_number(at.value)))
        if whole_number(at.value) is None:
            self.note(at, "no number, and engines and LMCache must hash alike: pdserve's own is used", "replaced")

    def _same_length(self) -> None:
        """Give both roles one max-model-len, which they must have. A request needs both, so the smaller one of decode
        holds already."""
        roles = self.launch.roles
        if "prefill" not in roles or "decode" not in roles:
            return
        first, second = (roles[name].args.get("max-model-len") for name in ("prefill", "decode"))
        if first is None or second is None or first.value == second.value:
            return
        if not isinstance(first.value, int) or not isinstance(second.value, int) or second.value > first.value:
            why = f"decode has {second.value}, and both roles must have the same: {first.value} is used"
            self.note(second, why, "served")
            roles["decode"].args["max-model-len"] = first
        else:
            why = f"decode takes {second.value} tokens at most, and each request goes through both: {second.value}"
            self.note(first, why, "replaced")
            roles["prefill"].args["max-model-len"] = second

    def _role(self, role: EngineRole, engines: EngineLaunch) -> None:
        self.put((role, "instances"), engines.instances.of(read_count(engines.instances, "instances", self.launch)))
        cached = "l1_size_gb" in self.launch.lmcache and _uses_lmcache(engines.kv_transfer)
        self.put((role, "parallel"), take_parallelism(self.launch, role, cached=cached))
        for name in list(engines.args):
            if (instead := where_instead(name, role)) is not None:
                # What a file of flags sets is not known, and was served.
                effect: Effect = "served" if name == "config" else "replaced"
                self.note(engines.args.pop(name), f"pdserve sets --{name}: {instead}", effect)
        self.put((role, "args"), engines.args)
        self.put((role, "env"), engines.env)
        for name, at in [*engines.args.items(), *engines.env.items()]:
            if isinstance(at.value, str) and (left := _placeholders(at.value)):
                self.note(at, f"{left} is filled in by srtctl, and a recipe has no word for it ({name})", "served")

    def _connectors(self) -> None:
        roles = self.launch.roles
        configs = {role: engines.kv_transfer for role, engines in roles.items() if engines.kv_transfer is not None}
        for role, at in list(configs.items()):
            if not isinstance(at.value, dict):
                self.note(at, "not a JSON object, so not read", "served")
                del configs[role]
            elif role == "aggregated" and at.value.get("kv_connector") == "NixlConnector":
                self.note(at, "an aggregated engine moves KV to no other engine", "replaced")
                del configs[role]
        self._check_supported(configs)
        lacking = [role for role in roles if role in ("prefill", "decode") and role not in configs]
        if lacking:
            raise RecipeError(
                f"{' and '.join(lacking)} have no KV connector",
                where=f"{self.launch.file}:{roles[lacking[0]].at.line}",
                cause="without one nothing moves KV from prefill to decode",
                todo="add --kv-transfer-config to both roles of the file, and import again",
            )
        if "l1_size_gb" in self.launch.lmcache:
            configs = {role: self._without_timeouts(at) for role, at in configs.items()}
        raw = any(connectors.needs_raw(at.value) for at in configs.values())
        for role, at in configs.items():
            carried = connectors.section_of(at.value, raw=raw)
            for key, value in carried.section.items():
                self.set((role, "connector", key), value)
            self.origins[(role, "connector")] = str(at)
            if carried.load_failure is not None:
                self.put((role, "kv_load_failure_policy"), at.of(carried.load_failure))
            for path in connectors.acceptances(carried.section):
                why = f"it can corrupt KV (docs/limits.md): the recipe is refused until you add {path[-1]}: true"
                self.note(at, why, "confirm")
            for key, why in carried.replaced:
                self.note(SourcedValue(None, f"{at.key}: {key}", at.line), why, "replaced")
            for key, why in carried.refused:
                self.note(SourcedValue(None, f"{at.key}: {key}", at.line), why, "confirm")
        attached = [role for role, at in configs.items() if _LMCACHE in connectors.classes(at.value)]
        if attached and "l1_size_gb" in self.launch.lmcache:
            self.put(("lmcache", "on"), [configs[role].of(role) for role in attached])
        self._store_users(configs)

    def _check_supported(self, configs: Mapping[EngineRole, SourcedValue]) -> None:
        """Refuse a connector that no recipe can have. Raises one RecipeError for all roles that have it."""
        users = [role for role, at in configs.items() if NIXL_PUSH in connectors.classes(at.value)]
        if users:
            raise RecipeError(
                REFUSED[NIXL_PUSH].why,
                where=f"{self.launch.file}:{configs[users[0]].line}",
                cause=f"{NIXL_PUSH} in the --kv-transfer-config of {' and '.join(users)}",
                todo="use kind: nixl (pull): write NixlConnector for it in the file, and import again",
            )

    def _without_timeouts(self, at: SourcedValue) -> SourcedValue:
        """Return the mapping of a role, whose timeouts of LMCache's clients become keys of the section: those of all
        roles."""
        mapping, timeouts = connectors.without_timeouts(at.value)
        for key, value in timeouts.items():
            known = self.launch.lmcache.setdefault(key, at.of(value))
            if known.value != value:
                self.note(at.of(value), f"all roles have one lmcache.{key}: {known.value}", "served")
        return at.of(mapping)

    def _store_users(self, configs: dict[EngineRole, SourcedValue]) -> None:
        users = [at for at in configs.values() if "MooncakeStoreConnector" in connectors.classes(at.value)]
        if self.launch.store and not users:
            at = next((value for value in self.launch.store.values() if isinstance(value, SourcedValue)), None)
            self.launch.store.clear()
            if at is not None:
                self.note(at, "no engine of the file uses the store", "replaced")


def _uses_lmcache(at: SourcedValue | None) -> bool:
    return at is not None and isinstance(at.value, dict) and _LMCACHE in connectors.classes(at.value)


def _written(value: Any) -> Any:
    """Write a value for a recipe: srtctl's {job_id} becomes a reference, and what looks like one stays literal."""
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_written(item) for item in value]
    return escape(value).replace("{job_id}", _JOB) if isinstance(value, str) else value


def _placeholders(text: str) -> str | None:
    """Return the first {word} of a text that is no JSON."""
    for part in text.split("{")[1:]:
        word, closed, _ = part.partition("}")
        if closed and word.isidentifier() and word != "job_id":
            return f"{{{word}}}"
    return None


_SIZES = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "dp": "data-parallel-size",
}
_LOCAL = "data-parallel-size-local"


def take_parallelism(launch: Launch, role: EngineRole, *, cached: bool) -> dict[str, SourcedValue]:
    """Take the flags out of the role's `args`, and return its section. `cached`: it attaches to an LMCache server."""
    reader, engines = _Reader(launch, role), launch.roles[role]
    sizes = {key: reader.size(key, flag) for key, flag in _SIZES.items()}
    ranks = math.prod(sizes.values())
    reader.experts(several=sizes["tp"] * sizes["pcp"] * sizes["dp"] > 1)
    reader.devices(ranks)
    each = whole_number(launch.devices_per_node.value) if launch.devices_per_node is not None else None
    nodes = -(-ranks // each) if each and each > 0 else None
    if nodes is not None and nodes > 1:
        reader.section["nodes"] = (engines.devices or engines.at).of(nodes)
    reader.balancing(sizes["dp"], nodes, cached=cached)
    return reader.section


def read_count(at: SourcedValue, of: str, launch: Launch) -> int:
    """Read how many there are; 1, and a note, where the value does not say it."""
    number = whole_number(at.value)
    if number is not None and number > 0:
        return number
    launch.note(at, f"{show.value(at.value)} is no number of {of}: 1 is used", "served")
    return 1


class _Reader:
    def __init__(self, launch: Launch, role: EngineRole) -> None:
        self.launch, self.engines, self.role = launch, launch.roles[role], role
        self.args = self.engines.args
        self.section: dict[str, SourcedValue] = {}

    def size(self, key: str, flag: str) -> int:
        """Read one of the sizes whose product are the ranks."""
        at = self.args.pop(flag, None)
        if at is None:
            return 1
        number = read_count(at, "ranks", self.launch)
        if number > 1:
            self.section[key] = at.of(number)
        return number

    def experts(self, *, several: bool) -> None:
        """Read whether the experts are spread over the ranks."""
        at = self.args.pop("enable-expert-parallel", None)
        if at is None or at.value is not True:
            return
        if several:
            self.section["ep"] = at
        else:
            self.launch.note(at, "there is one rank, which has all experts", "replaced")

    def devices(self, ranks: int) -> None:
        """Compare the devices that the file has with the flags, which decide."""
        at = self.engines.devices
        if at is not None and (given := whole_number(at.value)) != ranks:
            shown = show.value(at.value) if given is None else given
            self.launch.note(
                at, f"{shown} devices for an instance, and its flags use {ranks}: pdserve gives it {ranks}", "served"
            )

    def balancing(self, dp: int, nodes: int | None, *, cached: bool) -> None:
        """Read which API servers an instance has. `nodes`: those that it spans; None: the file lacks their size."""
        mode, at = self._asked()
        if at is None:
            return
        key = f"{self.role}.parallel"
        if nodes is None and mode == "hybrid" and (nodes := self._nodes_of_flags(dp)) is not None and nodes > 1:
            self.section["nodes"] = at.of(nodes)
        if dp == 1:
            self.launch.note(at, "there is one data-parallel rank, and nobody chooses among them", "replaced")
        elif cached:
            why = "pdserve connects LMCache to instances with one API server only, which chooses among all ranks"
            self.launch.note(
                at, f"{why}: take {self.role} out of lmcache.on and set {key}.load_balancing: {mode}", "served"
            )
        elif mode == "hybrid" and nodes is None:
            why = "the file does not have over how many nodes"
            self.launch.note(at, f"{why}: set {key}.nodes, and {key}.load_balancing: {mode}", "served")
        elif mode == "hybrid" and nodes == 1:
            self.launch.note(at, "on one node that is one API server for all ranks", "replaced")
        elif dp % (nodes or 1):
            why = f"{dp} ranks over {nodes} nodes, and with {mode} load balancing every node has whole ranks"
            self.launch.note(
                at, f"{why}: set {key}.dp to a multiple of the nodes, and {key}.load_balancing: {mode}", "served"
            )
        else:
            # With one rank on each node vLLM takes it for external load balancing (engine/arg_utils.py).
            self.section["load_balancing"] = at.of("external" if mode == "hybrid" and dp == nodes else mode)

    def _asked(self) -> tuple[LoadBalancing, SourcedValue | None]:
        """Return the load balancing that is asked for. A rank of an engine makes its load balancing external, and the
        first rank of a node with the number of its ranks makes it hybrid (vllm/engine/arg_utils.py,
        create_engine_config)."""
        for mode in ("external", "multi-port-external", "hybrid"):
            flag = f"data-parallel-{mode}-lb"
            if flag in self.args and self.args[flag].value is True:
                return "hybrid" if mode == "hybrid" else "external", self.args.pop(flag)
        if (rank := self.args.get("data-parallel-rank")) is not None:
            return "external", rank
        if _LOCAL in self.args and "headless" not in self.args:
            return "hybrid", self.args.get("data-parallel-start-rank")
        return "internal", None

    def _nodes_of_flags(self, dp: int) -> int | None:
        """Count the nodes by their number, or by the ranks on each."""
        nnodes, local = (whole_number(at.value) if (at := self.args.get(name)) else None for name in ("nnodes", _LOCAL))
        nodes = nnodes or (dp // local if local and dp % local == 0 else None)
        return nodes if nodes and dp % nodes == 0 else None
