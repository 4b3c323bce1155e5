"""docs/kimi-launches.md: what our recipe of two nodes renders, beside the launches that others have published."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pdserve.plan.model import Plan, Process
from tests.plan.golden import shipped_plan

RECIPE = "kimi-mi355x-2node"
DATA = Path(__file__).with_name("kimi_launches.toml")
_OURS_ALONE = "PDSERVE_"
_ADDRESSES = {"VLLM_HOST_IP", "host", "NO_PROXY", "no_proxy"}
"""They differ from node to node; in the plan they are examples."""

_HEAD = """\
# Kimi-K2.5 on MI355X: our launch beside the published ones

What [kimi-mi355x-2node](../recipes/kimi-mi355x-2node.yaml) renders, flag by flag, and why where it differs. Made from
the plan of the recipe and from `tests/docs/kimi_launches.toml` by `python -m tests.docs.regenerate`. Tests keep it
true: every flag and variable of our plan is here, a reason stands where we differ and nowhere else, and vLLM's own
parser and configuration classes take the commands. None of it was run on an MI355X ([limits.md](limits.md)).

- **InferenceX #1924**: 1 prefill and 1 decode with eight devices each, Mooncake over tcp, LMCache on prefill. The last
  commit of its branch, which was never merged and had an image that is not public. What was wrong in its patches:
  [published-patches.md](published-patches.md).
- **vLLM's recipe**: one engine for `amd/Kimi-K2.5-MXFP4` on MI355X, from vllm-project/recipes (July 2026).

`-` is: not set. Variables whose names begin with `PDSERVE_` are left out: they name our patches
([patches.md](patches.md)).
"""

_TITLES = {
    "engine": ("Engines: flags", "Where prefill and decode differ, prefill is first."),
    "environment": ("Engines: environment", "They inherit the image's, too."),
    "prefill": ("Prefill: `--kv-transfer-config`", "`0` and `1` are the children of the MultiConnector."),
    "decode": ("Decode: `--kv-transfer-config`", ""),
    "lmcache": ("LMCache server: flags", "One server, on the node of prefill."),
    "lmcache-environment": (
        "LMCache server: environment",
        "The published server inherits everything; ours names on a list, because it prints its environment to clients.",
    ),
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


def same(left: str | None, right: str | None) -> bool:
    """0.9 and 0.90 are."""
    if left is None or right is None:
        return left is right
    try:
        return float(left) == float(right)
    except ValueError:
        return left == right


def parts() -> dict[str, list[Row]]:
    """Every part of the launch with its rows, those of the data first, in its order."""
    published: dict[str, dict[str, dict[str, str]]] = tomllib.loads(DATA.read_text())
    rendered = ours(shipped_plan(RECIPE))
    assert published.keys() == rendered.keys() == _TITLES.keys()
    return {part: [*_rows(published[part], rendered[part])] for part in _TITLES}


def _rows(data: Mapping[str, Mapping[str, str]], values: Mapping[str, str]) -> Iterator[Row]:
    for name in (*data, *(name for name in values if name not in data)):
        entry = data.get(name, {})
        yield Row(name, values.get(name), entry.get("published"), entry.get("vllm"), entry.get("why"))


def ours(plan: Plan) -> dict[str, dict[str, str]]:
    """What the plan has for each part."""
    prefill, decode, server = (plan.process(name) for name in ("prefill-0", "decode-0", "lmcache-0"))
    flags, config = zip(*map(_engine_flags, (prefill, decode)), strict=True)
    proxy = {"host": plan.proxy.host, "port": str(plan.proxy.port)}
    if plan.proxy.auth.keys_file is not None:
        proxy["keys_file"] = PurePosixPath(plan.proxy.auth.keys_file).name
    return {
        "engine": _of_both(*flags),
        "environment": _of_both(_environment(prefill), _environment(decode)),
        "prefill": _flat(config[0]),
        "decode": _flat(config[1]),
        "lmcache": {**_flags(server.argv[3:]), "host": _value(server, "--host")},
        "lmcache-environment": {
            **_environment(server),
            **dict.fromkeys((name for name in server.env.allow if name.startswith("HSA")), "inherited"),
        },
        "proxy": proxy,
    }


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


def _of_both(prefill: Mapping[str, str], decode: Mapping[str, str]) -> dict[str, str]:
    merged = {}
    for name in dict.fromkeys((*prefill, *decode)):
        values = dict.fromkeys(side[name] for side in (prefill, decode) if name in side)
        merged[name] = "the node's address" if name in _ADDRESSES else " / ".join(values)
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
            flat[prefix + key] = str(value)
    return flat


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for part, rows in parts().items():
        title, note = _TITLES[part]
        lines += [f"## {title}", "", *([note, ""] if note else []), *_table(rows), ""]
    return "\n".join(lines)


def _table(rows: list[Row]) -> Iterator[str]:
    vllm = any(row.vllm is not None for row in rows)
    head = ["name", "ours", "InferenceX #1924", *(["vLLM's recipe"] if vllm else []), "why ours differs"]
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        cells = [f"`{row.name}`", _cell(row.ours), _cell(row.published), *([_cell(row.vllm)] if vllm else [])]
        yield f"| {' | '.join([*cells, row.why or ''])} |"


def _cell(value: str | None) -> str:
    if value is None:
        return "-"
    return value if " " in value and not value.startswith("{") else f"`{value}`"
