"""A mapping is wanted and something shorter was written, as other tools take it: `connector: mooncake`, `model: org/x`,
`args: --max-model-len 4096`. Reads it as the mapping that was meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.recipe.load.problems import Path, did_you_mean
from pdserve.recipe.load.yaml12 import scalar

Reader = Callable[[Any], dict[str, Any] | None]

_FLAG = re.compile(r"--?([A-Za-z0-9][\w.-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\s*[=:]\s*(.*)", re.DOTALL)
_SUBNET = re.compile(r"\d+\.\d+\.\d+\.\d+/\d+")
_PAIR = re.compile(r"([A-Za-z_][\w-]*):(\S.*)")


def meant(path: Path, value: Any, kinds: Sequence[str]) -> dict[str, Any] | list[Any] | None:
    """The mapping that `value` stands for at `path`; None where no reading suggests itself. `kinds`: of the union that
    stands there, if one does."""
    if kinds:
        return _kind(value, kinds)
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    reader = _READERS.get(key)
    if (read := None if reader is None else reader(value)) is not None:
        return read
    if isinstance(value, str) and (pair := _PAIR.fullmatch(value)) is not None:
        return {pair.group(1): scalar(pair.group(2))}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {key: item for part in value for key, item in part.items()}  # `- a: 1` for each key
    return None


def kind_of(word: str, kinds: Sequence[str]) -> str | None:
    """The kind that a word means: its own name, a slip of it, or vLLM's name of the class."""
    by_class = next((kind for kind, pattern in _CLASSES if pattern.fullmatch(word.lower())), None)
    return by_class if by_class in kinds else did_you_mean(word, kinds)


def with_kind(value: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any] | None:
    """A mapping that lacks its `kind`: `{mooncake: {protocol: tcp}}`, `{type: nixl}`."""
    if len(value) == 1:
        (name, inner), *_ = value.items()
        if (kind := kind_of(str(name), kinds)) is not None and isinstance(inner, dict | None):
            return {"kind": kind, **(inner or {})}
    for key in ("type", "name", "policy", "connector"):
        if isinstance(word := value.get(key), str) and (kind := kind_of(word, kinds)) is not None:
            return {"kind": kind, **{k: v for k, v in value.items() if k != key}}
    if "kv_connector" in value and "raw" in kinds:
        return {"kind": "raw", "config": value}
    return None


_CLASSES = (
    ("mooncake", re.compile(r"mooncake_?connector(v1)?")),
    ("nixl", re.compile(r"nixl_?connector(v1)?")),
    ("lmcache-mp", re.compile(r"lmcache(_?mp)?(_?connector)?(v1)?|lmcache[_-]mp")),
    ("multi", re.compile(r"multi_?connector|multiple")),
    ("prefix_aware", re.compile(r"cache_aware|prefix_cache")),
    ("power_of_two", re.compile(r"p2c|power_of_two_choices")),
    ("least_loaded", re.compile(r"least_(request|connections?)|load_aware")),
)
_NEEDS: dict[str, dict[str, Any]] = {
    "multi": {"of": [{"kind": "mooncake"}, {"kind": "lmcache-mp"}]},
    "raw": {"config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
}


def _kind(value: Any, kinds: Sequence[str]) -> dict[str, Any] | list[Any] | None:
    if isinstance(value, str):
        kind = kind_of(value, kinds)
        return None if kind is None else {"kind": kind, **_NEEDS.get(kind, {})}
    if isinstance(value, list) and value and "multi" in kinds:
        children = [item if isinstance(item, dict) else _kind(item, kinds) for item in value]
        if len(children) == 1:
            return children[0]
        return None if None in children else {"kind": "multi", "of": children}
    return None


def _model(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, str) or not value:
        return None
    where = "path" if value.startswith(("/", ".", "~")) else "id"
    return {where: value, "served_name": value.rstrip("/").rpartition("/")[2] or "my-model"}


def _only(key: str, *types: type) -> Reader:
    """A section whose one important key was written in its place."""

    def read(value: Any) -> dict[str, Any] | None:
        return {key: value} if isinstance(value, types) and not isinstance(value, bool) else None

    return read


def _switched_on(key: str, example: Any) -> Reader:
    """The same, where `true` is written too."""

    def read(value: Any) -> dict[str, Any] | None:
        if value is True or value == "auto":
            return {key: example}
        return _only(key, int, float)(value)

    return read


def _network(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, str):
        return None
    return {"cidr" if _SUBNET.fullmatch(value) else "interface": value}


def _container(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, str):
        return None
    if value in ("docker", "apptainer", "pyxis"):
        return {"kind": value, "image": "vllm/vllm-openai:latest"}
    return {"kind": "docker", "image": value}


def _flags(value: Any) -> dict[str, Any] | None:
    """A command line as text, or as a list of words."""
    try:
        words = shlex.split(value) if isinstance(value, str) else [str(w) for w in value if isinstance(w, str | int)]
    except (TypeError, ValueError):
        return None
    flags: dict[str, Any] = {}
    last = None
    for word in (part for item in words for part in (item.split() if item.startswith("-") else [item])):
        if (flag := _FLAG.fullmatch(word)) is not None:
            last = flag.group(1).replace("_", "-")
            flags[last] = True if flag.group(2) is None else scalar(flag.group(2))
        elif last is not None and flags[last] is True:
            flags[last] = scalar(word)
        else:
            return None
    return flags or None


def _variables(value: Any) -> dict[str, Any] | None:
    """`[A=1, B=2]` or `A=1`."""
    items = value if isinstance(value, list) else [value]
    pairs = [_ASSIGNED.fullmatch(item) if isinstance(item, str) else None for item in items]
    return {pair.group(1): pair.group(2) for pair in pairs if pair} if pairs and all(pairs) else None


_ROLE = _only("instances", int)
_READERS: dict[str, Reader] = {
    "model": _model,
    "prefill": _ROLE,
    "decode": _ROLE,
    "aggregated": _ROLE,
    "parallel": _only("tp", int),
    "lmcache": _switched_on("l1_size_gb", 64),
    "network": _network,
    "container": _container,
    "restart": _only("policy", str),
    "eviction": _only("policy", str),
    "logs": _only("max_mib", int),
    "retention": _only("runs", int),
    "slurm": _only("partition", str),
    "verify": _only("output", str),
    "hosts": _only("name", str),
    "args": _flags,
    "extra_args": _flags,
    "env": _variables,
}
"""Key of a section -> how a shorter form of it is read."""
