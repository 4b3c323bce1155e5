"""Connectors that keep KV in a node's host memory: an LMCache server (lmcache-mp), vLLM's own offloading."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pdserve.errors import RecipeError
from pdserve.recipe.base import Count
from pdserve.recipe.connectors.base import Config, ConnectorKind, Context, HostMemory, LeafSection
from pdserve.recipe.sections import Lmcache, TransferMode

LMCACHE_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
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
        """Return the mode that the engine asks for, as configured and as it comes out: on a CPU `auto` means
        engine_driven, on other platforms lmcache_driven. A connector that names none follows the server."""
        asked = self.transfer_mode or (server.transfer_mode if server is not None else "auto")
        if asked != "auto":
            return asked, asked
        return asked, "engine_driven" if platform == "cpu" else "lmcache_driven"

    def config(self, context: Context) -> Config:
        """Return the mapping, with kv_both on every role: a kv_consumer never stores."""
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
            **context.module(self.ABOUT.class_name, upstream=LMCACHE_MODULE),
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


_GIB = 1 << 30


class OffloadingSection(LeafSection):
    """An engine keeps KV in host memory of its own and reloads it from there. No server, and nothing is shared."""

    ABOUT: ClassVar[ConnectorKind] = ConnectorKind(class_name="OffloadingConnector", package="vllm", caches=True)

    kind: Literal["offloading"] = Field(default="offloading", description="vLLM's own offloading to host memory.")
    cpu_gib: float = Field(
        gt=0,
        description="Host memory of one engine for all its workers, GiB; with dp each rank is an engine. On CUDA it is "
        "in /dev/shm. All of it is committed at start.",
    )
    blocks_per_chunk: Count = Field(
        default=1,
        description="KV blocks that are moved as one piece (vLLM's default 1); more make fewer, larger copies.",
    )
    eviction: Literal["lru", "arc"] = Field(default="lru", description="What is dropped when the memory is full.")
    store_threshold: int = Field(
        default=0, ge=0, description="Store a block once it was asked for so many times (2 or more); 0: at once."
    )
    prompts_only: bool = Field(default=True, description="Store KV of prompts alone; false: of answers too.")

    def config(self, context: Context) -> Config:
        """Return the mapping, with kv_both on every role: it stores and loads wherever it is. vLLM 0.32 refuses it at
        start on a CPU."""
        if context.platform == "cpu":
            raise RecipeError(
                f"{context.role_name} uses offloading on a CPU",
                where=f"{context.role_name}.connector",
                cause='vLLM 0.32: "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"',
                todo="use lmcache-mp or mooncake-store there",
            )
        return {
            "kv_connector": self.ABOUT.class_name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": int(self.cpu_gib * _GIB),
                "blocks_per_chunk": self.blocks_per_chunk,
                "eviction_policy": self.eviction,
                "store_threshold": self.store_threshold,
                "offload_prompt_only": self.prompts_only,
            },
        }

    def host_memory(self, *, ranks: int, workers: int, platform: str) -> HostMemory:
        """Return the memory of one engine: one region, which its workers map on CUDA; on ROCm each worker has its own
        part."""
        size = int(self.cpu_gib * _GIB) * ranks
        return HostMemory(size, in_shm=size if platform == "cuda" else 0)

    def doubts(self, platform: str) -> tuple[tuple[str, str], ...]:
        what = "offloading was checked against vLLM's classes only: no GPU was at hand to run it"
        return ((what, "let `pdserve verify` prove the reload before you rely on it"),)
