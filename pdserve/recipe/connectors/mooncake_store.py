"""A Mooncake store: engines store KV in, and reload it from, the memory that all engines of the deployment share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from pdserve.recipe.connectors.base import Config, ConnectorKind, Context, LeafSection
from pdserve.recipe.connectors.mooncake import FORCE_TCP, LIBRARIES, OWNED_RANGE, TRANSFER, transfer_range
from pdserve.roles import ENGINE_ROLES


def _rdma_devices(config: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, ...] | None:
    """Its protocol and devices are in a file of their own; the variable follows the protocol, and the plan adds the
    devices."""
    return None if variables.get(FORCE_TCP) == "1" else ()


class MooncakeStoreSection(LeafSection):
    """Stores KV in, and reloads it from, the memory that all engines share (section `mooncake_store`)."""

    ABOUT: ClassVar[ConnectorKind] = ConnectorKind(
        class_name="MooncakeStoreConnector",
        package="mooncake",
        uses_store=True,
        caches=True,
        # An engine reads and writes the memory of every other one.
        ports=(replace(TRANSFER, reached_by=dict.fromkeys(ENGINE_ROLES, ENGINE_ROLES)),),
        environment=transfer_range,
        owned_variables=OWNED_RANGE,
        libraries=LIBRARIES,
        rdma_devices=_rdma_devices,
    )

    kind: Literal["mooncake-store"] = Field(
        default="mooncake-store", description="The memory that all engines of the deployment share."
    )
    save_decode_cache: bool = Field(
        default=False, description="Store KV of answers too, and let decode engines store at all."
    )
    lookup: bool = Field(
        default=True,
        description="false: prompts are not looked up in the pool, so nothing is loaded from it. A decode engine that "
        "does not store either then only gives it memory.",
    )
    cache_prefix: str = Field(
        default="", description="Part of every key: engines with another prefix do not see each other's KV."
    )

    def features(self) -> frozenset[str]:
        return frozenset({"mooncake-store.save_decode_cache"} if self.save_decode_cache else ())

    def config(self, context: Context) -> Config:
        """The role's own side: a kv_consumer loads and does not store, a kv_producer does both.

        Lookups are asynchronous: without its master each takes 4.4 s (mooncake 0.3.13, measured), and vLLM's default
        would hold the whole engine for so long.
        """
        extra: Config = {"load_async": True, "lookup_async": True, "save_decode_cache": self.save_decode_cache}
        if not self.lookup:
            extra["enable_lookup"] = False
        if self.cache_prefix:
            extra["cache_prefix"] = self.cache_prefix
        return {
            "kv_connector": self.ABOUT.class_name,
            "kv_role": context.kv_role,
            "kv_connector_extra_config": extra,
        }
