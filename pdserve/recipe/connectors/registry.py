"""The connectors that a role may use, and those that are refused. A new one is a file beside this one, and its names
in the lines below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, assert_never

from pydantic import Field

from pdserve.recipe.base import Strict
from pdserve.recipe.connectors.base import Config, ConnectorKind, ConnectorPort, LeafSection
from pdserve.recipe.connectors.caches import LmcacheMpSection, OffloadingSection
from pdserve.recipe.connectors.mooncake import MooncakePorts, MooncakeSection, MooncakeStoreSection
from pdserve.recipe.connectors.moriio import MoriioPorts, MoriioSection
from pdserve.recipe.connectors.nixl import NixlPorts, NixlSection


@dataclass(frozen=True)
class RefusedConnector:
    """A connector that is refused: why, and what to use instead."""

    why: str
    todo: str


NIXL_PUSH = "NixlPushConnector"
REFUSED: Mapping[str, RefusedConnector] = {
    # kv_connector/v1/nixl/push_*.py, vllm#46283 and vllm#48633.
    NIXL_PUSH: RefusedConnector(
        "NIXL push is not supported: it ran on no device here, and in vllm 0.32 decode waits for ever for KV that does "
        "not come, loses the blocks of aborted requests, and gets KV of other prompts from writes after a lease",
        "use kind: nixl, where decode pulls",
    ),
    # kv_connector/v1/moriio/moriio_connector.py. `update_connector_output` frees sends after `defer_timeout`: a long
    # one, and a proxy that aborts decode before, would close that. Nothing closes the rest: `wait_for_layer_load` gives
    # up its wait after `transfer_timeout` and computes on, `_pop_done_transfers` forgets a read after
    # `recv_abort_timeout`, and neither stops the RDMA, which then writes into blocks that may have been freed.
    "MoRIIOConnector": RefusedConnector(
        "in vllm 0.32 decode computes on before its KV has arrived when a read takes longer than `transfer_timeout` "
        "(30 s), and forgets the read after `recv_abort_timeout` (120 s), which may still write into blocks of other "
        "prompts; prefill frees its blocks after `defer_timeout` (60 s), also while decode has the request queued",
        "use kind: nixl or kind: mooncake; kind: moriio sets those times, and needs accept_unsafe_aborts: true",
    ),
}
"""vLLM's class name -> why not."""


AnyLeaf = MooncakeSection | NixlSection | MoriioSection | LmcacheMpSection | MooncakeStoreSection | OffloadingSection
SECTIONS: tuple[type[AnyLeaf], ...] = (
    MooncakeSection,
    NixlSection,
    MoriioSection,
    LmcacheMpSection,
    MooncakeStoreSection,
    OffloadingSection,
)


class ConnectorPorts(MoriioPorts, NixlPorts, MooncakePorts):
    """The keys of all connectors in the recipe's `ports`."""


KINDS: Mapping[str, ConnectorKind] = {section.ABOUT.class_name: section.ABOUT for section in SECTIONS}
"""vLLM's class name -> what is known of it."""

MULTI_CLASS = "MultiConnector"


class RawSection(Strict):
    """A KVTransferConfig mapping handed to vLLM as it is. Nothing about it is checked: marked unverified."""

    kind: Literal["raw"] = Field(default="raw", description="Not checked.")
    config: dict[str, Any] = Field(description="The whole mapping for --kv-transfer-config.")


class MultiSection(Strict):
    """vLLM's MultiConnector: loads from the first child that has tokens, saves to every child."""

    kind: Literal["multi"] = Field(default="multi", description="Several connectors at once.")
    of: list[Annotated[AnyLeaf, Field(discriminator="kind")]] = Field(
        min_length=2, description="Children in order of priority."
    )


AnyConnector = AnyLeaf | MultiSection | RawSection
Connector = Annotated[AnyConnector, Field(discriminator="kind")]


def leaf_configs(config: Config) -> Iterator[Config]:
    """Yield the mappings of connectors in one of vLLM's: the children of a MultiConnector instead of itself."""
    extra = config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    if not isinstance(children, list):
        yield config
        return
    for child in children:
        if isinstance(child, dict):
            yield from leaf_configs(child)


def child_mappings(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield the children of a raw MultiConnector, and theirs, each with the keys that lead to it."""
    extra = config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    for index, child in enumerate(children if isinstance(children, list) else ()):
        if isinstance(child, Mapping):
            path = ("kv_connector_extra_config", "connectors", index)
            yield path, child
            yield from (((*path, *deeper), inner) for deeper, inner in child_mappings(child))


def class_names(connector: AnyConnector | None) -> frozenset[str]:
    """Return vLLM's class names of the connector and its children: what patches and known defects are about."""
    match connector:
        case None:
            return frozenset()
        case RawSection():
            return frozenset(_raw_names(connector.config))
        case MultiSection():
            return frozenset({MULTI_CLASS, *(leaf.ABOUT.class_name for leaf in connector.of)})
        case LeafSection():
            return frozenset({connector.ABOUT.class_name})
        case _:
            assert_never(connector)


def kinds_of(connector: AnyConnector | None) -> tuple[ConnectorKind, ...]:
    """Return the kinds of a connector and its children, in the order of the registration."""
    names = class_names(connector)
    return tuple(kind for name, kind in KINDS.items() if name in names)


def ports_of(connector: AnyConnector | None) -> tuple[ConnectorPort, ...]:
    """Return the ports of the connector and its children. What two of them share is one port, reached by the peers of
    both."""
    ports: dict[str, ConnectorPort] = {}
    for port in (port for kind in kinds_of(connector) for port in kind.ports):
        known = ports.get(port.key)
        ports[port.key] = port if known is None else known.shared_with(port)
    return tuple(ports.values())


def uses_store(connector: AnyConnector | None) -> bool:
    """Return whether engines with this connector need the master of a Mooncake store."""
    return any(kind.uses_store for kind in kinds_of(connector))


def attaches_lmcache(connector: AnyConnector | None) -> bool:
    """Return whether engines with this connector register at the node's LMCache server."""
    return any(kind.attaches_lmcache for kind in kinds_of(connector))


def untested_connectors(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of these class names of vLLM that are experimental, whatever a recipe says of its state."""
    return tuple(sorted(name for name in set(names) if name in KINDS and KINDS[name].experimental))


def transfer_kinds() -> str:
    """Return the kinds of sections that move KV between prefill and decode, for messages."""
    offered = [section for section in SECTIONS if section.ABOUT.protocol and not section.ABOUT.experimental]
    return " or ".join(section.model_fields["kind"].default for section in offered)


def _raw_names(config: Mapping[str, Any]) -> Iterator[str]:
    for mapping in (config, *(child for _, child in child_mappings(config))):
        name = mapping.get("kv_connector")
        if isinstance(name, str):
            yield name
