"""Where the engines of vLLM's collection of recipes keep KV beside their devices: an option of its taxonomy
(`kv_offload`), or a store of its folder `kv_store/`.

Either is laid over the flags of a strategy as their last layer (src/lib/command-synthesis.js there, 8959cf6). With
prefill and decode only a store composes: it has a connector for each of them. What runs beside the engines becomes a
section of the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import RecipeError
from pdserve.importing import cache_servers
from pdserve.importing.collection import INSTALLED_BY_HAND, NOT_STARTED, OWN_PROXY, Collection, at_in, key_in
from pdserve.importing.command_line.flags import ImportedFlag, from_argv
from pdserve.importing.launch import Launch, Sourced
from pdserve.importing.shell.lines import commands, plain
from pdserve.importing.yaml_tree import Tree
from pdserve.recipe.load.problems import Path


class KvOffload(Protocol):
    """One option or store."""

    @property
    def tree(self) -> Tree:
        """The file that it is in."""
        ...

    def args(self, part: str | None) -> Path:
        """Where the flags of a role are; None: the one role there is."""
        ...

    def env(self) -> Path:
        """Where the variables of all engines are."""
        ...

    def read_servers(self, launch: Launch) -> None:
        """Add what runs beside the engines."""
        ...


@dataclass(frozen=True)
class Situation:
    """What decides which options there are."""

    recipe: Tree
    strategy: str
    has_pools: bool
    """Prefill and decode are engines of their own."""
    brand: str


def chosen(name: str, beside: Collection, situation: Situation) -> KvOffload:
    """The option or store of that name. Raises RecipeError for one that is not there, or not for this launch."""
    taxonomy, stores = beside.taxonomy, beside.stores
    options = taxonomy.get("kv_offload")
    refused = {key: _why_not(taxonomy, key, situation) for key in (options if isinstance(options, dict) else {})}
    usable = [key for key, why in refused.items() if why is None]
    usable += [key for key, store in stores.items() if _embedded(store)]
    if name in stores and _embedded(stores[name]):
        return _Store(stores[name])
    if name in refused and refused[name] is None:
        return _Option(taxonomy, name)
    cause = refused.get(name)
    if name in stores:
        cause = "its memory belongs to a process of its own (mooncake_store_service), which a recipe does not start"
    raise RecipeError(
        f"this launch cannot have the KV offload {name}" if cause else f"the collection has no KV offload {name}",
        where=situation.recipe.file,
        cause=cause,
        todo=f"give --kv-offload one of: {', '.join(usable)}" if usable else "leave --kv-offload out",
    )


def _embedded(store: Tree) -> bool:
    return store.get("mooncake_vllm_config", "template", "mode") in (None, "embedded")


def _why_not(taxonomy: Tree, name: str, situation: Situation) -> str | None:
    strategies, brands = (taxonomy.get("kv_offload", name, key) for key in ("strategies", "brands"))
    support = situation.recipe.get("kv_offload_support", name)
    if situation.has_pools:
        return "its connector would take the place of the one between prefill and decode"
    if isinstance(strategies, list) and strategies and situation.strategy not in strategies:
        return f"it is for {', '.join(map(str, strategies))}"
    if isinstance(brands, list) and brands and situation.brand not in brands:
        return f"it is for devices of {', '.join(map(str, brands))}"
    if support == "unsupported":
        return "the recipe has it as unsupported (kv_offload_support)"
    if taxonomy.get("kv_offload", name, "requires_opt_in") is True and support != "verified":
        return "the recipe does not have it as verified (kv_offload_support)"
    return None


@dataclass(frozen=True)
class _Option:
    """Of the taxonomy."""

    tree: Tree
    name: str

    def args(self, part: str | None) -> Path:
        return (*self._path, "args")

    def env(self) -> Path:
        return (*self._path, "env")

    def read_servers(self, launch: Launch) -> None:
        if self.tree.has(*self._path, "install"):
            launch.note(at_in(self.tree, (*self._path, "install")), INSTALLED_BY_HAND, "confirm")
        companion: Path = (*self._path, "companion")
        if not self.tree.has(*companion):
            return
        found = list(_flags(self.tree, (*companion, "command"), ("lmcache", "server")))
        cache_servers.read_lmcache(found, launch)
        if not found:
            launch.note(at_in(self.tree, companion), NOT_STARTED, "served")

    @property
    def _path(self) -> Path:
        return ("kv_offload", self.name)


@dataclass(frozen=True)
class _Store:
    """Of kv_store/."""

    tree: Tree

    def args(self, part: str | None) -> Path:
        return ("pd", part, "args") if part else ("vllm", "vllm_args")

    def env(self) -> Path:
        return ("vllm", "env")

    def read_servers(self, launch: Launch) -> None:
        template: Path = ("mooncake_vllm_config", "template")
        values = self.tree.get(*template)
        names = values if isinstance(values, dict) else {}
        cache_servers.read_store_file({key: at_in(self.tree, (*template, key)) for key in names}, launch)
        master: Path = ("mooncake_master", "command")
        cache_servers.read_master(_flags(self.tree, master, ("mooncake_master",)), launch)
        if self.tree.has("router"):
            launch.note(at_in(self.tree, ("router",)), OWN_PROXY, "unused")
        if self.tree.has("vllm", "install"):
            launch.note(at_in(self.tree, ("vllm", "install")), INSTALLED_BY_HAND, "confirm")


def _flags(tree: Tree, path: Path, program: tuple[str, ...]) -> Iterator[tuple[Sourced, ImportedFlag | str]]:
    """The flags of the first command that starts with `program`, in the text at `path`."""
    text = tree.get(*path)
    if not isinstance(text, str):
        return
    first = tree.line(*path)
    for command in commands(text):
        words = [plain(word.text) for word in command]
        if tuple(words[: len(program)]) != program:
            continue
        for index, item in from_argv(words[len(program) :]):
            # A text of several lines begins behind the line of its key.
            line = first + command[len(program) + index].line if "\n" in text.strip() else first
            yield Sourced(None, key_in(tree, path), line), item
        return
