"""A recipe of vLLM's own collection (models/ORG/NAME.yaml) -> a launch: of one variant, on one hardware, with one
strategy and a set of features.

The collection puts the command line together from layers (src/lib/command-synthesis.js there, 8959cf6): base, variant,
strategy, the recipe's changes of the strategy, hardware, features; of a flag given twice the later one holds. The
layers are the same here, in that order; KV offloading is the last one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.errors import RecipeError
from pdserve.importing import cache_servers, environment
from pdserve.importing.command_line import (
    ImportedFlag,
    from_argv,
    merge_flags,
)
from pdserve.importing.launch import EngineLaunch, ImportChoice, Launch, SourcedValue
from pdserve.importing.shell_words import commands
from pdserve.importing.yaml_tree import Tree
from pdserve.recipe.load.problems import Path, dotted
from pdserve.roles import EngineRole

INSTALLED_BY_HAND = "installed by hand there; the image must have it, or setup of the recipe"
NOT_STARTED = "a process beside the engines, which is not started"
OWN_PROXY = "pdserve has a proxy of its own (section proxy)"


@dataclass(frozen=True)
class Collection:
    """Holds the hardware of the collection, and its strategies and stores by name."""

    taxonomy: Tree
    strategies: Mapping[str, Tree]
    stores: Mapping[str, Tree]


def is_recipe(tree: Tree) -> bool:
    """Return whether the file looks like a recipe of the collection."""
    return isinstance(tree.get("model"), dict) and tree.has("model", "model_id") and tree.has("variants")


def key_in(tree: Tree, path: Path) -> str:
    """Return the key, with the file where it is not the recipe itself."""
    return dotted(path) if is_recipe(tree) else f"{tree.file.rpartition('/')[2]} {dotted(path)}"


def at_in(tree: Tree, path: Path) -> SourcedValue:
    """Return what is at `path`, with its place."""
    return SourcedValue(tree.get(*path), key_in(tree, path), tree.line(*path))


@dataclass(frozen=True)
class _KvOffload:
    """An option of the taxonomy, or a store of kv_store/, which has a file of its own."""

    tree: Tree
    option: Path = ()
    """Where the option is; empty for a store."""

    def args(self, part: str | None) -> Path:
        """Return where the flags of a role are; None: the one role there is."""
        if self.option:
            return (*self.option, "args")
        return ("pd", part, "args") if part else ("vllm", "vllm_args")

    def env(self) -> Path:
        """Return where the variables of all engines are."""
        return (*self.option, "env") if self.option else ("vllm", "env")

    def read_servers(self, launch: Launch) -> None:
        """Add to a launch what runs beside the engines."""
        if self.option:
            self._read_lmcache(launch)
        else:
            self._read_store(launch)
        install: Path = (*self.option, "install") if self.option else ("vllm", "install")
        if self.tree.has(*install):
            launch.note(at_in(self.tree, install), INSTALLED_BY_HAND, "confirm")

    def _read_lmcache(self, launch: Launch) -> None:
        companion: Path = (*self.option, "companion")
        if not self.tree.has(*companion):
            return
        found = list(_flags(self.tree, (*companion, "command"), ("lmcache", "server")))
        cache_servers.read_lmcache(found, launch)
        if not found:
            launch.note(at_in(self.tree, companion), NOT_STARTED, "served")

    def _read_store(self, launch: Launch) -> None:
        template: Path = ("mooncake_vllm_config", "template")
        values = self.tree.get(*template)
        names = values if isinstance(values, dict) else {}
        cache_servers.read_store_file({key: at_in(self.tree, (*template, key)) for key in names}, launch)
        master: Path = ("mooncake_master", "command")
        cache_servers.read_master(_flags(self.tree, master, ("mooncake_master",)), launch)
        if self.tree.has("router"):
            launch.note(at_in(self.tree, ("router",)), OWN_PROXY, "unused")


def _embedded(store: Tree) -> bool:
    return store.get("mooncake_vllm_config", "template", "mode") in (None, "embedded")


def _flags(tree: Tree, path: Path, program: tuple[str, ...]) -> Iterator[tuple[SourcedValue, ImportedFlag | str]]:
    """Yield the flags of the first command that starts with `program`, in the text at `path`."""
    text = tree.get(*path)
    if not isinstance(text, str):
        return
    # A text of several lines begins behind the line of its key.
    before = tree.line(*path) - ("\n" not in text.strip())
    for command in commands(text, tree.file, before):
        words = [word.text for word in command.words]
        if tuple(words[: len(program)]) != program:
            continue
        for index, item in from_argv(words[len(program) :]):
            yield SourcedValue(None, key_in(tree, path), command.words[len(program) + index].line), item
        return


FORMAT = "vLLM recipes"
OPTIONS = ("--variant", "--hardware", "--strategy", "--feature", "--nodes", "--kv-offload")
"""What chooses among the deployments of a file."""
_NODES = ("$IFACE_NAME", "$PREFILL_NODE_1", "$DECODE_NODE_1", "$HEAD_IP")
_IMAGES = {"NVIDIA": ("nvidia", "vllm/vllm-openai:latest"), "AMD": ("amd", "vllm/vllm-openai-rocm:latest")}
_TRAY_ONLY = (
    "VLLM_USE_NCCL_SYMM_MEM",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NVLS_ENABLE",
    "UCX_NET_DEVICES",
)
"""Variables that the collection leaves out on other hardware than GB200 and GB300."""
_TRAYS = ("gb200", "gb300")


@dataclass
class _Layers:
    """The flags and variables of one role, layer by layer."""

    flags: list[tuple[ImportedFlag, SourcedValue]] = field(default_factory=list)
    env: dict[str, SourcedValue] = field(default_factory=dict)

    def add(self, tree: Tree, path: Path) -> None:
        """Add the flags of the list at `path`, if it is there."""
        words = tree.get(*path)
        if not isinstance(words, list):
            return
        # A flag and its value are one item at times.
        split = [(part, i) for i, word in enumerate(words) for part in _parts(str(word))]
        for index, item in from_argv([part for part, _ in split]):
            at = SourcedValue(None, key_in(tree, path), tree.line(*path, split[index][1]))
            if isinstance(item, ImportedFlag):
                self.flags.append((item, at))

    def add_env(self, tree: Tree, path: Path) -> None:
        """Add the variables of the mapping at `path`."""
        values = tree.get(*path)
        for name in values if isinstance(values, dict) else ():
            self.env[name] = at_in(tree, (*path, name))

    def flag(self, name: str, value: Any, at: SourcedValue) -> None:
        """Add a flag."""
        self.flags.append((ImportedFlag(name, value), at))


def launch(tree: Tree, beside: Collection, choice: ImportChoice) -> Launch:
    """Compose the launch that was chosen. Raises RecipeError for a choice that the recipe does not offer, naming those
    that it does."""
    return _Composer(tree, beside, choice).launch()


class _Composer:
    def __init__(self, tree: Tree, beside: Collection, choice: ImportChoice) -> None:
        self.tree = tree
        self.taxonomy = beside.taxonomy
        if tree.has("omni"):
            raise RecipeError(
                "the recipe is for vLLM-Omni",
                where=f"{tree.file}:{tree.line('omni')}",
                cause="its server has other flags and routes than vLLM's, and pdserve does not start it",
                todo="import a recipe without `omni`",
            )
        self.variant = self._choice("variant", choice.variant or "default", tree.get("variants") or {})
        compatible = tree.get("compatible_strategies") or []
        wanted = choice.strategy or tree.get("default_strategy") or (compatible or ["single_node_tp"])[0]
        self.strategy = self._choice("strategy", wanted, [name for name in compatible if name in beside.strategies])
        self.plan = beside.strategies[self.strategy]
        profiles = self.taxonomy.get("hardware_profiles") or {}
        offered = [name for name, profile in profiles.items() if self._runs_on(name, profile)]
        self.hardware = self._choice("hardware", choice.hardware or self._usual(offered), offered)
        self.profile: dict[str, Any] = profiles[self.hardware]
        self.gpus = int(self.profile.get("gpu_count") or 1)
        known = list(tree.get("features") or {})
        opt_in = tree.get("opt_in_features") or []
        chosen = choice.features if choice.features is not None else [item for item in known if item not in opt_in]
        self.features = [self._choice("feature", name, known) for name in chosen]
        self.nodes = choice.nodes
        self.generation = self._generation()
        self.brand = str(self.profile.get("brand"))
        self.has_pools = self.plan.get("deploy_type") == "pd_cluster"
        self.offload = None
        if choice.kv_offload is not None:
            self.offload = self._choose_offload(choice.kv_offload, beside)

    def launch(self) -> Launch:
        brand = self.brand
        if brand not in _IMAGES:
            raise RecipeError(
                f"the hardware {self.hardware} is of {brand}",
                where=self.tree.file,
                cause="pdserve starts engines on NVIDIA and AMD devices, and on CPUs",
                todo="choose other hardware with --hardware",
            )
        at = SourcedValue(self.hardware, f"hardware {self.hardware}", 0)
        name = f"{self.tree.get('meta', 'slug') or 'model'}-{self.hardware}-{self.strategy}-{self.variant}"
        result = Launch(self.tree.file, FORMAT, at.of(name), at.of("rocm" if brand == "AMD" else "cuda"))
        result.devices_per_node = at.of(self.gpus)
        result.model_id = self._model()
        result.served_name = result.model_id
        result.image = self._image(brand)
        result.container["kind"] = SourcedValue("docker", "vLLM's recipes start docker", 0)
        roles: tuple[EngineRole, ...] = ("aggregated",)
        if self.has_pools:
            roles = ("prefill", "decode")
        for role in roles:
            result.roles[role] = self._role(role, result)
        self._notes(result)
        return result

    def _runs_on(self, name: str, profile: Mapping[str, Any]) -> bool:
        """Tell whether the recipe runs on a hardware. One that it does not name is taken to do, except for that of few
        users."""
        support = self.tree.get("meta", "hardware", name)
        return support != "unsupported" and (support is not None or not profile.get("restricted"))

    def _usual(self, offered: list[str]) -> str:
        """Return what the collection's page begins with."""
        precise = str(self.tree.get("variants", self.variant, "precision")).endswith("fp4")
        wanted = [self.tree.get("meta", "default_hardware"), *(["b200", "gb200"] if precise else []), "h200"]
        return next((str(name) for name in wanted if name in offered), (offered or ["h200"])[0])

    def _choice(self, what: str, name: str, offered: Any) -> str:
        if name not in offered:
            raise RecipeError(
                f"the recipe has no {what} {name}",
                where=self.tree.file,
                todo=f"give --{what} one of: {', '.join(map(str, offered)) or 'none is there'}",
            )
        return name

    def _choose_offload(self, name: str, beside: Collection) -> _KvOffload:
        """Return the option or store of that name. Raises RecipeError for one that is not there, or not for this
        launch."""
        stores, options = beside.stores, self.taxonomy.get("kv_offload")
        refused = {key: self._why_not(key) for key in (options if isinstance(options, dict) else {})}
        usable = [key for key, why in refused.items() if why is None]
        usable += [key for key, store in stores.items() if _embedded(store)]
        if name in stores and _embedded(stores[name]):
            return _KvOffload(stores[name])
        if name in refused and refused[name] is None:
            return _KvOffload(self.taxonomy, ("kv_offload", name))
        cause = refused.get(name)
        if name in stores:
            cause = "its memory belongs to a process of its own (mooncake_store_service), which a recipe does not start"
        raise RecipeError(
            f"this launch cannot have the KV offload {name}" if cause else f"the collection has no KV offload {name}",
            where=self.tree.file,
            cause=cause,
            todo=f"give --kv-offload one of: {', '.join(usable)}" if usable else "leave --kv-offload out",
        )

    def _why_not(self, name: str) -> str | None:
        strategies, brands = (self.taxonomy.get("kv_offload", name, key) for key in ("strategies", "brands"))
        support = self.tree.get("kv_offload_support", name)
        if self.has_pools:
            return "its connector would take the place of the one between prefill and decode"
        if isinstance(strategies, list) and strategies and self.strategy not in strategies:
            return f"it is for {', '.join(map(str, strategies))}"
        if isinstance(brands, list) and brands and self.brand not in brands:
            return f"it is for devices of {', '.join(map(str, brands))}"
        if support == "unsupported":
            return "the recipe has it as unsupported (kv_offload_support)"
        if self.taxonomy.get("kv_offload", name, "requires_opt_in") is True and support != "verified":
            return "the recipe does not have it as verified (kv_offload_support)"
        return None

    def _generation(self) -> str:
        value = self.profile.get("generation") or self.profile.get("gpu_generation")
        return str(value[0] if isinstance(value, list) else value)

    def _model(self) -> SourcedValue:
        for path in (("variants", self.variant, "model_id"), ("model", "model_id")):
            if self.tree.get(*path) is not None:
                return at_in(self.tree, path)
        raise RecipeError("the recipe names no model", where=self.tree.file, todo="set model.model_id in it")

    def _image(self, brand: str) -> SourcedValue:
        key, usual = _IMAGES[brand]
        for path in (("variants", self.variant, "docker_image"), ("model", "docker_image")):
            if isinstance(self.tree.get(*path), str) and brand == "NVIDIA":
                return at_in(self.tree, path)
            if isinstance(self.tree.get(*path, key), str):
                return at_in(self.tree, (*path, key))
        nightly = usual.replace(":latest", ":nightly") if self.tree.get("model", "nightly_required") is True else usual
        return SourcedValue(nightly, "the image that vLLM's recipes take", 0)

    def _role(self, role: EngineRole, result: Launch) -> EngineLaunch:
        layers = _Layers()
        tree, part = self.tree, None if role == "aggregated" else role
        layers.add(tree, ("model", "base_args"))
        layers.add_env(tree, ("model", "base_env"))
        variant: Path = ("variants", self.variant)
        for own in (variant, (*variant, "hardware_overrides", self.hardware)):
            layers.add(tree, (*own, "extra_args"))
            layers.add_env(tree, (*own, "extra_env"))
        layers.add(self.plan, (part, "vllm_args") if part else ("vllm_args",))
        layers.add_env(self.plan, (part, "env") if part else ("env",))
        if self.offload is not None:
            layers.add_env(self.offload.tree, self.offload.env())
        self._parallelism(role, layers)
        changes: Path = ("strategy_overrides", self.strategy)
        for own in ((*changes, part),) if part else (changes,):
            layers.add(tree, (*own, "extra_args"))
            layers.add(tree, (*own, "vllm_args"))
        layers.add_env(tree, (*changes, "env"))
        layers.add_env(tree, (*changes, part, "env") if part else (*changes, "extra_env"))
        for own in self._hardware(changes, part):
            layers.add(tree, (*own, "extra_args"))
            layers.add_env(tree, (*own, "extra_env"))
        for path in self._features():
            layers.add(tree, path)
        if self.offload is not None:
            layers.add(self.offload.tree, self.offload.args(part))
        env = {name: at for name, at in layers.env.items() if self._kept(name, at, result)}
        item = EngineLaunch(SourcedValue(None, f"strategy {self.strategy}", 0), SourcedValue(1, "one instance", 0))
        item.env = environment.carry_over(env, result, role)
        item.args = merge_flags(layers.flags)
        item.kv_transfer = item.args.pop("kv-transfer-config", None)
        return item

    def _kept(self, name: str, at: SourcedValue, result: Launch) -> bool:
        if any(node in str(at.value) for node in _NODES):
            result.note(at, "pdserve knows the nodes' addresses; a network is named by network.interface", "replaced")
            return False
        if name in _TRAY_ONLY and self.hardware not in _TRAYS:
            result.note(at, "vLLM's recipes set it on GB200 and GB300 only", "replaced")
            return False
        return True

    def _parallelism(self, role: EngineRole, layers: _Layers) -> None:
        at = SourcedValue(None, f"strategy {self.strategy} on {self.gpus} devices a node", 0)
        if role != "aggregated":
            self._pool(role, layers, at)
            return
        flag = str(self.plan.get("parallel_flag") or "--tensor-parallel-size").lstrip("-")
        if self.plan.get("deploy_type") != "multi_node":
            layers.flag(flag, self._single_node_size(), at)
            return
        nodes = self._number_of_nodes()
        layout = self.plan.get("parallelism")
        if layout in ("tp_pp", "tp_dp"):
            layers.flag("tensor-parallel-size", self.gpus, at)
            layers.flag("pipeline-parallel-size" if layout == "tp_pp" else "data-parallel-size", nodes, at)
        else:
            layers.flag(flag, self.gpus * nodes, at)

    def _number_of_nodes(self) -> int:
        if self.nodes is None:
            raise RecipeError(
                f"the strategy {self.strategy} needs a number of nodes",
                where=self.tree.file,
                todo="give --nodes 2, or more",
            )
        return self.nodes

    def _pool(self, role: EngineRole, layers: _Layers, at: SourcedValue) -> None:
        changes = self.tree.get("strategy_overrides", self.strategy, role) or {}
        own = self.plan.get(role) or {}
        nodes = self.nodes or self._for_hardware(changes.get("nodes")) or 1
        mode = changes.get("parallelism") or own.get("parallelism") or "tp"
        allowed = self.tree.get("strategy_overrides", self.strategy, "pool_modes")
        if isinstance(allowed, list) and allowed and mode not in allowed:
            mode = allowed[0]
        if mode == "dep":
            tp = int(changes.get("tp") or own.get("tp") or 1)
            layers.flag("tensor-parallel-size", tp, at)
            layers.flag("data-parallel-size", nodes * max(1, self.gpus // tp), at)
        else:
            layers.flag("tensor-parallel-size", nodes * self.gpus, at)
        if mode in ("dep", "tep"):
            layers.flag("enable-expert-parallel", True, at)

    def _single_node_size(self) -> int:
        """Return a declared size, else one device where the weights fit on it, else all of the node."""
        if self.strategy != "single_node_tp":
            return self.gpus
        for raw in (
            self.tree.get("variants", self.variant, "tp"),
            self.tree.get("strategy_overrides", self.strategy, "tp"),
        ):
            if isinstance(size := self._for_hardware(raw), int) and size > 0:
                return min(size, self.gpus)
        weights = self.tree.get("variants", self.variant, "vram_minimum_gb") or 0
        each = (self.profile.get("vram_gb") or 0) / self.gpus
        return 1 if weights and each and weights <= each else self.gpus

    def _for_hardware(self, value: Any) -> Any:
        """Return a value, or one of a mapping by device, generation, maker or default."""
        if not isinstance(value, dict):
            return value
        keys = (self.hardware, self.generation, str(self.profile.get("brand")).lower(), "default")
        return next((value[key] for key in keys if key in value), None)

    def _hardware(self, changes: Path, part: str | None) -> Iterator[Path]:
        """Yield the paths of the changes for the hardware. A strategy's change for the generation takes the place of
        the recipe's and the variant's; one for the exact device comes on top."""
        if (own := self._of_generation((*changes, "hardware_overrides"))) is not None:
            yield own
        else:
            for base in ((), ("variants", self.variant)):
                if (general := self._of_generation((*base, "hardware_overrides"))) is not None:
                    yield general
        yield (*changes, "hardware_overrides", self.hardware)
        if part:
            yield (*changes, part, "hardware_overrides", self.hardware)

    def _of_generation(self, path: Path) -> Path | None:
        maker = ["nvidia"] if self.profile.get("brand") == "NVIDIA" else []
        return next(((*path, key) for key in [self.generation, *maker] if self.tree.get(*path, key)), None)

    def _features(self) -> Iterator[Path]:
        for name in self.features:
            path: Path = ("features", name)
            allowed = self.tree.get(*path, "strategies")
            if isinstance(allowed, list) and allowed and self.strategy not in allowed:
                continue
            if isinstance(self.tree.get(*path, "modes"), dict):
                if (mode := self._mode(path)) is None:
                    continue
                path = mode
            own = self._of_generation((*path, "hardware_overrides"))
            yield (*own, "args") if own is not None and self.tree.has(*own, "args") else (*path, "args")

    def _mode(self, path: Path) -> Path | None:
        modes = self.tree.get(*path, "modes")
        usable = [
            key
            for key, mode in modes.items()
            if self.variant in (mode.get("variants") or [self.variant])
            and "unsupported" not in [(mode.get("hardware") or {}).get(k) for k in (self.generation, self.hardware)]
        ]
        own = self.tree.get("variants", self.variant, "default_modes", path[-1])
        wanted = [key for key in (own, self.tree.get(*path, "default_mode")) if key in usable]
        chosen = (wanted or usable or [None])[0]
        return None if chosen is None else (*path, "modes", chosen)

    def _notes(self, result: Launch) -> None:
        for name in self.features:
            if self.tree.has("features", name, "companion"):
                result.note(at_in(self.tree, ("features", name, "companion")), NOT_STARTED, "served")
        if self.offload is not None:
            self.offload.read_servers(result)
        if self.plan.has("router"):
            result.note(at_in(self.plan, ("router",)), OWN_PROXY, "unused")
        for key in ("dependencies", "extra_install"):
            if self.tree.has(key):
                result.note(at_in(self.tree, (key,)), INSTALLED_BY_HAND, "confirm")


def _parts(word: str) -> list[str]:
    return shlex.split(word) if word.startswith("--") and " " in word and "{" not in word else [word]
