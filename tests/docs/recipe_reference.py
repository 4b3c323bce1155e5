"""docs/recipe.md from the models: every key of a recipe with its type, default and description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from pdserve.pd.config import routing, settings
from pdserve.reach import cluster_file
from pdserve.recipe import model, sections
from pdserve.recipe.base import SecretRef
from pdserve.recipe.connectors import registry
from tests.docs.markdown import anchor


def _policies() -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Whatever the union of the routing policies has."""
    union, _ = get_args(routing.Policy)
    for policy in get_args(union):
        kind = policy.model_fields["kind"].default
        yield f"policy: {kind}", f"`{{kind: {kind}}}`", policy


def _connectors() -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Whatever is registered."""
    for section in registry.SECTIONS:
        kind = section.model_fields["kind"].default
        yield f"connector: {kind}", f"`connector: {{kind: {kind}}}`", section


_SECTIONS: Sequence[tuple[str, str, type[BaseModel]]] = (
    ("Top level", "", model.Recipe),
    ("model", "`model:`", model.Model),
    ("engine", "`engine:`", model.Engine),
    ("prefill, decode, aggregated", "`prefill:`, `decode:` and `aggregated:`, one shape", model.Role),
    ("parallel", "`prefill.parallel:` and those of the other roles", model.Parallel),
    ("restart", "`prefill.restart:`, those of the other roles, and `proxy.restart:`", sections.RestartPolicy),
    *_connectors(),
    ("connector: multi", "`connector: {kind: multi}`", registry.MultiSection),
    ("connector: raw", "`connector: {kind: raw}`", registry.RawSection),
    ("lmcache", "`lmcache:`", sections.Lmcache),
    ("lmcache.eviction", "`lmcache.eviction:`", sections.Eviction),
    ("mooncake_store", "`mooncake_store:`", sections.MooncakeStore),
    ("proxy", "`proxy:`", model.Proxy),
    ("proxy.routing", "`proxy.routing:`", routing.RoutingSettings),
    *_policies(),
    ("proxy.routing.load", "`proxy.routing.load:`", routing.LoadSettings),
    ("proxy.routing.affinity", "`proxy.routing.affinity:`", routing.AffinitySettings),
    ("proxy.routing.conditional", "`proxy.routing.conditional:`", routing.ConditionalSettings),
    ("proxy.admission", "`proxy.admission:`", settings.AdmissionSettings),
    ("limits of a pool", "`proxy.admission.prefill:` and those of the other pools", settings.PoolLimits),
    ("proxy.breaker", "`proxy.breaker:`", settings.BreakerSettings),
    ("proxy.health", "`proxy.health:`", settings.HealthSettings),
    ("proxy.limits", "`proxy.limits:`", settings.LimitsSettings),
    ("proxy.auth", "`proxy.auth:`", settings.AuthSettings),
    ("proxy.tls", "`proxy.tls:`", settings.TlsSettings),
    ("proxy.cors", "`proxy.cors:`", settings.CorsSettings),
    ("proxy.upstream_tls", "`proxy.upstream_tls:`", settings.UpstreamTlsSettings),
    ("proxy.admin", "`proxy.admin:`", settings.AdminSettings),
    ("proxy.otel", "`proxy.otel:`", settings.OtelSettings),
    ("ports", "`ports:`", model.Ports),
    ("timeouts", "`timeouts:`", model.Timeouts),
    ("logs", "`logs:`", sections.Logs),
    ("retention", "`retention:`", model.Retention),
    ("verify", "`verify:`", model.Verify),
    ("network", "`network:`", sections.Network),
    ("fabric", "`fabric:`", sections.Fabric),
    ("slurm", "`slurm:`", sections.Slurm),
    ("container", "`container:`", sections.Container),
    ("secret", "", SecretRef),
    ("Cluster file", "The file that `--cluster` names", cluster_file.Cluster),
    ("hosts", "`hosts:` of a cluster file", cluster_file.Host),
    ("ssh", "`ssh:` of a cluster file", cluster_file.SshSection),
)
"""Title, where the keys stand, model."""

_NUMBERS = {"minimum": "≥ {}", "maximum": "≤ {}", "exclusiveMinimum": "> {}", "exclusiveMaximum": "< {}"}
_JSON = ("boolean", "integer", "number", "string", "array", "object")
_SCALARS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


def recipe_sections() -> Iterator[str]:
    """Yield one section for each model."""
    schema = model.Recipe.model_json_schema(by_alias=True)
    cluster = cluster_file.Cluster.model_json_schema(by_alias=True)
    definitions: Mapping[str, Any] = {**cluster["$defs"], **schema["$defs"], "Cluster": cluster}
    for title, where, shown in _SECTIONS:
        properties = (schema if shown is model.Recipe else definitions[shown.__name__])["properties"]
        yield from _section(title, where, shown, properties)


def _section(title: str, where: str, shown: type[BaseModel], properties: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {title}\n"
    about = " ".join((shown.__doc__ or "").split())
    if shown is not model.Recipe:
        begins = about if about[1:2].isupper() else about[0].lower() + about[1:]
        yield f"{where}: {begins}\n" if where else f"{about}\n"
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in properties.items():
        cells = (f"`{name}`", _type(field), _default(name, field, shown), field["description"])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _type(schema: Mapping[str, Any]) -> str:
    """In a reader's words; null is left out: it means the default everywhere."""
    for key in ("anyOf", "oneOf"):
        if key in schema:
            options = [option for option in schema[key] if option.get("type") != "null"]
            whole = {option.get("type") for option in options} == set(_JSON)
            return "any value" if whole else _either(list(dict.fromkeys(map(_type, options))))
    if "$ref" in schema:
        return _linked(schema["$ref"].rsplit("/", 1)[-1])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            items = _type(schema["items"]) if schema.get("items") else "anything"
            return f"list of {items}" if "," not in items else f"list of: {items}"
        case "object":
            return _mapping(schema)
        case None:
            return "anything"
        case kind:
            limits = [text.format(schema[key]) for key, text in _NUMBERS.items() if key in schema]
            return " ".join([_SCALARS[kind], " and ".join(limits)]).strip()


def _either(options: Sequence[str]) -> str:
    return " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)


def _mapping(schema: Mapping[str, Any]) -> str:
    values = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    inner = next((_type(value) for value in values if isinstance(value, Mapping) and value), "anything")
    if inner == "any value":
        return "mapping of flags"
    names = schema.get("propertyNames", {}).get("enum")
    keys = f" with keys {', '.join(f'`{name}`' for name in names)}" if names else ""
    return f"mapping{keys}" if inner == "anything" else f"mapping{keys} to {inner}"


def _linked(definition: str) -> str:
    """A nested model is a link to its section."""
    title = next(title for title, _, shown in _SECTIONS if shown.__name__ == definition)
    name = "role" if definition == "Role" else title.removeprefix("connector: ")
    return f"[{name}](#{anchor(title)})"


def _default(name: str, field: Mapping[str, Any], shown: type[BaseModel]) -> str:
    attribute = next(f for n, f in shown.model_fields.items() if (f.alias or n) == name)
    if attribute.is_required():
        return "required"
    value = attribute.default
    if isinstance(value, BaseModel):
        changed = value.model_dump(exclude_defaults=True)
        return f"`{json.dumps(changed)}`" if changed else "its defaults"
    if value is None:
        return "`null`"
    return f"`{json.dumps(value)}`"
