"""LMCache: engines store KV in, and reload it from, the LMCache MP server of their node."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pdserve.errors import RecipeError
from pdserve.recipe.base import Count
from pdserve.recipe.connectors.base import Config, ConnectorKind, Context, LeafSection
from pdserve.recipe.sections.lmcache import Lmcache, TransferMode

MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
"""Named explicitly: vLLM's own class of that name cannot talk to lmcache 0.5.x."""


class LmcacheMpSection(LeafSection):
    """Stores KV in, and reloads it from, the LMCache MP server of the same node (section `lmcache`)."""

    ABOUT: ClassVar[ConnectorKind] = ConnectorKind(
        class_name="LMCacheMPConnector",
        package="lmcache",
        attaches_lmcache=True,
        caches=True,
        owned_variables={"LMCACHE_MP_TRANSFER_MODE": "set transfer_mode of the lmcache-mp connector"},
    )

    kind: Literal["lmcache-mp"] = Field(default="lmcache-mp", description="The LMCache server of the node.")
    transfer_mode: TransferMode | None = Field(
        default=None,
        description="The engine's side of the transfer mode; null: the mode that the server side implies. "
        "A pair that does not match makes the engine hang for the message timeout, so it is refused.",
    )
    max_tokens_per_load: Count | None = Field(
        default=None,
        description="Load at most so many tokens of a prompt from LMCache and compute the rest (whole chunks); "
        "null: no cap. CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD in the role's env overrides it, 0 turns it off.",
    )
    min_load_tokens: Count | None = Field(
        default=None, description="A reload that would bring fewer tokens than this is computed instead; null: never."
    )

    def modes(self, server: Lmcache | None, platform: str) -> tuple[TransferMode, TransferMode]:
        """The mode that the engine asks for, as configured and as it comes out: on a CPU `auto` means engine_driven,
        on other platforms lmcache_driven. A connector that names none follows the server."""
        asked = self.transfer_mode or (server.transfer_mode if server is not None else "auto")
        if asked != "auto":
            return asked, asked
        return asked, "engine_driven" if platform == "cpu" else "lmcache_driven"

    def config(self, context: Context) -> Config:
        """kv_both on every role: a kv_consumer never stores."""
        server = context.lmcache
        if server is None or not context.lmcache_ports:
            raise RecipeError(
                f"{context.role_name} uses lmcache-mp, but no LMCache server is planned for it",
                where=f"{context.role_name}.connector",
                todo=f"add an lmcache section whose `on` lists {context.role_name}, or take lmcache-mp out",
            )
        extra: Config = (
            {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": context.lmcache_ports[0]}
            if server.per == "node"
            else {"lmcache.mp.server_urls": [f"tcp://127.0.0.1:{port}" for port in context.lmcache_ports]}
        )
        extra["lmcache.mp.mq_timeout"] = server.mq_timeout_seconds
        extra["lmcache.mp.heartbeat_interval"] = server.heartbeat_seconds
        # Never left to `auto`: a pair that resolves differently hangs until mq_timeout and then blames the network.
        extra["lmcache.mp.mp_transfer_mode"] = self.modes(server, context.platform)[1]
        if self.max_tokens_per_load is not None:
            extra["pdserve.max_tokens_per_load"] = self.max_tokens_per_load
        if self.min_load_tokens is not None:
            extra["pdserve.min_load_tokens"] = self.min_load_tokens
        return {
            "kv_connector": self.ABOUT.class_name,
            **context.module(self.ABOUT.class_name, upstream=MODULE),
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
