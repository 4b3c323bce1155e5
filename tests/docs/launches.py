"""docs/kimi-launches.md and docs/launches.md: what our recipes render, beside the launches that others published."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.roles import ENGINE_ROLES
from tests.plan.golden import shipped_plan

KIMI = "kimi-mi355x-2node"
OTHERS = (
    "minimax-m3-mi355x-lmcache",
    "gpt-oss-h200-1p3d",
    "qwen36-27b-lmcache",
    "minimax-m3-gb300-store",
    "deepseek-r1-wide-ep",
)
DATA = Path(__file__).with_name("launches_data")
_OURS_ALONE = "PDSERVE_"
_ADDRESSES = {"VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST", "host", "data-parallel-address", "NO_PROXY", "no_proxy"}
"""They differ from node to node; in the plan they are examples."""

_TITLES = {
    "engine": ("Engines: flags", "Where prefill and decode differ, prefill is first."),
    "environment": ("Engines: environment", "They inherit the image's, too."),
    "prefill": ("Prefill: `--kv-transfer-config`", "`0` and `1` are the children of the MultiConnector."),
    "decode": ("Decode: `--kv-transfer-config`", ""),
    "aggregated": ("Engine: `--kv-transfer-config`", ""),
    "lmcache": ("LMCache server: flags", ""),
    "lmcache-environment": (
        "LMCache server: environment",
        "The published server inherits everything; ours names on a list, because it prints its environment to clients.",
    ),
    "store": ("Mooncake store: configuration of an engine", ""),
    "mooncake-master": ("Mooncake store: flags of the master", ""),
    "proxy": ("Proxy", "Its whole configuration: [recipe.md](recipe.md#proxy)."),
}


@dataclass(frozen=True)
class Row:
    """One flag, variable or key. None: not set."""

    name: str
    ours: str | None
    published: str | None
    vllm: str | None
    why: str | None

    @property
    def differs(self) -> bool:
        """From the published launch, or from vLLM's recipe where that has a value."""
        return not same(self.ours, self.published) or (self.vllm is not None and not same(self.ours, self.vllm))

    @property
    def ours_alone(self) -> bool:
        """No source has it."""
        return self.ours is not None and self.published is None and self.vllm is None


@dataclass(frozen=True)
class Launch:
    """One recipe beside its source."""

    recipe: str
    source: str
    """The column's heading."""
    about: str
    """What was published, where, and at which commit. Empty: the head of the page has it."""
    parts: Mapping[str, Sequence[Row]]


def same(left: str | None, right: str | None) -> bool:
    """0.9 and 0.90 are, and mappings with other blanks."""
    if left is None or right is None:
        return left is right
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return left == right


@cache
def launch(recipe: str) -> Launch:
    """Every part of the launch with its rows, those of the data first, in its order."""
    data: dict[str, Any] = tomllib.loads((DATA / f"{recipe}.toml").read_text())
    source, about = data.pop("source"), data.pop("about", "")
    rendered = ours(shipped_plan(recipe))
    assert set(data) <= set(rendered), "the data has a part that is not rendered"
    parts = {part: [*_rows(data.get(part, {}), rendered[part])] for part in _TITLES if part in rendered}
    if recipe != KIMI:
        shown = {part: [*_not_on_kimis_page(part, rows)] for part, rows in parts.items() if part != "proxy"}
        parts = {part: rows for part, rows in shown.items() if rows}
    return Launch(recipe, source, about, parts)


def _rows(data: Mapping[str, Mapping[str, str]], values: Mapping[str, str]) -> Iterator[Row]:
    for name in (*data, *(name for name in values if name not in data)):
        entry = data.get(name, {})
        yield Row(name, values.get(name), entry.get("published"), entry.get("vllm"), entry.get("why"))


def _not_on_kimis_page(part: str, rows: Sequence[Row]) -> Iterator[Row]:
    explained = {row.name for row in launch(KIMI).parts.get(part, ()) if row.ours_alone}
    yield from (row for row in rows if not (row.ours_alone and row.why is None and row.name in explained))


def ours(plan: Plan) -> dict[str, dict[str, str]]:
    """What the plan has for each part."""
    engines = [process for process in plan.processes if process.role in ENGINE_ROLES and process.name.endswith("-0")]
    flags, configs = zip(*map(_engine_flags, engines), strict=True)
    proxy = {"host": plan.proxy.host, "port": str(plan.proxy.port)}
    if plan.proxy.auth.keys_file is not None:
        proxy["keys_file"] = PurePosixPath(plan.proxy.auth.keys_file).name
    parts: dict[str, dict[str, str]] = {
        "engine": _of_all(engines, flags),
        "environment": _of_all(engines, [_environment(engine) for engine in engines]),
        **{engine.role: _flat(config) for engine, config in zip(engines, configs, strict=True)},
        "proxy": proxy,
    }
    for process in plan.processes:
        if process.name == "lmcache-0":
            parts["lmcache"] = {**_flags(process.argv[3:]), "host": _value(process, "--host")}
            inherited = (name for name in process.env.allow if name.startswith("HSA"))
            parts["lmcache-environment"] = {**_environment(process), **dict.fromkeys(inherited, "inherited")}
        elif process.role == "mooncake-master":
            (file,) = engines[0].files.values()
            parts["store"] = {**_flat(json.loads(file)), "master_server_address": "the address of the first node"}
            flags_of_master = dict(word.removeprefix("-").split("=", 1) for word in process.argv[3:])
            parts["mooncake-master"] = {**flags_of_master, "rpc_address": "the node's address"}
    return parts


def _engine_flags(process: Process) -> tuple[dict[str, str], dict[str, Any]]:
    serve = process.argv.index("serve")
    flags = _flags(process.argv[serve + 2 :])
    config: dict[str, Any] = json.loads(flags.pop("kv-transfer-config"))
    return {"model": process.argv[serve + 1], **flags}, config


def _flags(words: tuple[str, ...]) -> dict[str, str]:
    """Flag -> its value; `yes` for one without."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            flags[name] = "yes"
        else:
            flags[name] = word
    return flags


def _value(process: Process, flag: str) -> str:
    return process.argv[process.argv.index(flag) + 1]


def _environment(process: Process) -> dict[str, str]:
    plain = {name: value for name, value in process.env.set.items() if not name.startswith(_OURS_ALONE)}
    return {**plain, **dict.fromkeys(process.env.secrets, "a random key")}


def _of_all(engines: Sequence[Process], sides: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What only one of several roles has stands behind its name."""
    merged = {}
    for name in dict.fromkeys(name for side in sides for name in side):
        values = {engine.role: side[name] for engine, side in zip(engines, sides, strict=True) if name in side}
        if name in _ADDRESSES:
            merged[name] = "the node's address"
        elif name == "MOONCAKE_CONFIG_PATH":
            merged[name] = "a file of the run"
        elif len(values) < len(engines):
            merged[name] = ", ".join(f"{role}: {value}" for role, value in values.items())
        else:
            merged[name] = " / ".join(dict.fromkeys(values.values()))
    return merged


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The keys of a connector; those of its extra config beside them, those of its children behind their number."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key == "kv_connector_extra_config":
            flat |= _flat(value, prefix)
        elif key == "connectors":
            for number, child in enumerate(value):
                flat |= _flat(child, f"{prefix}{number}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat


def kimi_sections() -> Iterator[str]:
    """Yield what is made of docs/kimi-launches.md."""
    yield from _sections(launch(KIMI), "##")


def other_sections() -> Iterator[str]:
    """Yield what is made of docs/launches.md."""
    for shown in map(launch, OTHERS):
        yield f"## {shown.recipe}\n\n[The recipe](../recipes/{shown.recipe}.yaml). {shown.about}\n"
        yield from _sections(shown, "###")


def _sections(shown: Launch, level: str) -> Iterator[str]:
    for part, rows in shown.parts.items():
        title, note = _TITLES[part]
        yield from (f"{level} {title}", "", *([note, ""] if note else []), *_table(shown.source, rows), "")


def _table(source: str, rows: Sequence[Row]) -> Iterator[str]:
    vllm = any(row.vllm is not None for row in rows)
    head = ["name", "ours", source, *(["vLLM's recipe"] if vllm else []), "why ours differs"]
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        cells = [f"`{row.name}`", _cell(row.ours), _cell(row.published), *([_cell(row.vllm)] if vllm else [])]
        yield f"| {' | '.join([*cells, row.why or ''])} |"


def _cell(value: str | None) -> str:
    if value is None:
        return "-"
    return value if " " in value and not value.startswith("{") else f"`{value}`"
