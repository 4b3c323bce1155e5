"""vLLM's own offloading: an engine keeps KV in host memory and reloads it from there."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pdserve.errors import RecipeError
from pdserve.recipe.base import Count
from pdserve.recipe.connectors.base import Config, ConnectorKind, Context, HostMemory, LeafSection

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
        """kv_both on every role: it stores and loads wherever it is. vLLM 0.32 refuses it at start on a CPU."""
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
        """One region an engine, which its workers map on CUDA; on ROCm each worker has its own part."""
        size = int(self.cpu_gib * _GIB) * ranks
        return HostMemory(size, in_shm=size if platform == "cuda" else 0)

    def doubts(self, platform: str) -> tuple[tuple[str, str], ...]:
        what = "offloading was checked against vLLM's classes only: no GPU was at hand to run it"
        return ((what, "let `pdserve verify` prove the reload before you rely on it"),)
