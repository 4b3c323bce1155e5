"""Mooncake: prefill pushes KV to decode (mooncake), and a pool of host memory that engines share (mooncake-store)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from pdserve.recipe.base import Count, Port, Strict, TrialTransfer
from pdserve.recipe.connectors.base import (
    Config,
    ConnectorKind,
    ConnectorPort,
    Context,
    EngineSide,
    LeafSection,
)
from pdserve.roles import ENGINE_ROLES

TRANSFER_PORTS = 100
"""Ports in the range of one engine process: two a worker would do, the rest keeps the random choice from failing."""

FORCE_TCP = "MC_FORCE_TCP"
"""Without it a transfer engine looks for RDMA devices first, and takes them, whatever the protocol is."""
TRANSFER = ConnectorPort(
    key="transfer",
    purpose="transfer",
    what="Mooncake transfers",
    exposes="Mooncake transfer engine: reads and writes KV memory",
    used_by="other engines; binds 0.0.0.0",
    reached_by={"decode": ("prefill",)},
    count=TRANSFER_PORTS,
    chosen=True,
    everywhere=True,
)
"""One range for all transfer engines of a process: the variables that set it are the process's."""
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "librdmacm.so.1": "librdmacm1", "libnuma.so.1": "libnuma1"}
"""Linked by its wheels, whatever the protocol. vLLM hides the failing import behind "Mooncake is not available"."""
OWNED_RANGE = {"MC_MIN_RPC_PORT": "set ports.transfer", "MC_MAX_RPC_PORT": "set ports.transfer"}


class MooncakePorts(Strict):
    """Holds Mooncake's keys of the recipe's `ports`."""

    bootstrap: Port = Field(default=8998, description="Mooncake bootstrap (HTTP, binds 0.0.0.0), one a prefill.")
    transfer: Port = Field(
        default=15000,
        description="First of the ports that Mooncake's transfer engines choose theirs from (100 an instance). They "
        "bind every interface and cannot be pinned one by one.",
    )


def transfer_range(side: EngineSide) -> dict[str, str]:
    """Return the variables that keep transfer engines within their range."""
    if not (ports := side.ports.get(TRANSFER.purpose)):
        return {}
    return {"MC_MIN_RPC_PORT": str(ports.start), "MC_MAX_RPC_PORT": str(ports.stop - 1)}


def _environment(side: EngineSide) -> dict[str, str]:
    setting = transfer_range(side)
    if setting:
        setting = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(side.transfer_abort_seconds), **setting}
    if bootstrap := side.ports.get("bootstrap"):
        setting["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(bootstrap.start)
    return setting


def _rdma_devices(config: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the RDMA devices of a transfer. Its protocol is rdma unless the mapping names another one."""
    extra = config.get("kv_connector_extra_config")
    extra = extra if isinstance(extra, Mapping) else {}
    if variables.get(FORCE_TCP) == "1" or extra.get("mooncake_protocol", "rdma") != "rdma":
        return None
    return device_names(str(extra.get("device_name", "")))


def device_names(text: str) -> tuple[str, ...]:
    """Return the RDMA devices of a `device_name`; none: Mooncake chooses."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


class MooncakeSection(LeafSection):
    """Prefill pushes KV to decode through the Mooncake transfer engine."""

    ABOUT: ClassVar[ConnectorKind] = ConnectorKind(
        class_name="MooncakeConnector",
        package="mooncake",
        protocol="mooncake",
        tp_must_divide=True,
        ports=(
            # One whatever dp is: of the ranks behind an API server, only the first opens it.
            ConnectorPort(
                key="bootstrap",
                purpose="bootstrap",
                what="Mooncake bootstrap",
                exposes="Mooncake bootstrap: engine ids and worker addresses, and registration of workers",
                used_by="proxy and decode; binds 0.0.0.0",
                roles=("prefill",),
                reached_by={"prefill": ("proxy", "decode")},
                server_only=True,
                everywhere=True,
            ),
            TRANSFER,
        ),
        random_ports={"prefill": "Mooncake side channel, one a worker: asks prefill to send KV"},
        environment=_environment,
        owned_variables={
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": "set ports.bootstrap",
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "set timeouts.transfer_abort_seconds",
            **OWNED_RANGE,
        },
        libraries=LIBRARIES,
        rdma_devices=_rdma_devices,
        trial=lambda _: TrialTransfer(engine="mooncake", pulled=False, host_buffer=False, ports=TRANSFER.purpose),
    )
    AGREED = ("protocol",)

    kind: Literal["mooncake"] = Field(default="mooncake", description="Mooncake transfer engine, prefill pushes.")
    protocol: Literal["rdma", "tcp"] = Field(
        default="rdma",
        description="Transport of the transfer engine. rdma is vLLM's default; tcp needs no RDMA device. Over both "
        "Mooncake moves device memory only if it was built for the device.",
    )
    num_workers: Count = Field(
        default=10,
        description="Sender threads of a prefill worker (vLLM's default 10); twice as many transfers run at once.",
    )
    device_name: str = Field(default="", description="RDMA devices, comma separated; empty lets Mooncake choose.")

    def config(self, context: Context) -> Config:
        extra: Config = {"mooncake_protocol": self.protocol, "num_workers": self.num_workers}
        if self.device_name:
            extra["device_name"] = self.device_name
        return {
            "kv_connector": self.ABOUT.class_name,
            "kv_role": context.kv_role,
            "kv_connector_extra_config": extra,
        }

    def default_environment(self) -> dict[str, str]:
        return {FORCE_TCP: "1"} if self.protocol == "tcp" else {}

    def doubts(self, platform: str) -> tuple[tuple[str, str], ...]:
        if platform != "cpu" or self.protocol != "rdma":
            return ()
        return (("mooncake uses rdma, and few CPU machines have RDMA devices", "set protocol: tcp"),)

    def features(self) -> frozenset[str]:
        named = {"mooncake.device_name"} if self.device_name else set()
        return frozenset({f"mooncake.protocol={self.protocol}", *named})

    def proxy_settings(self) -> dict[str, Any]:
        """Return the slots of transfers: vLLM runs two transfers for each sender thread of a prefill worker."""
        return {"transfer_slots": 2 * self.num_workers}


def _rdma_devices_of_store(config: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the RDMA devices of a store. Its protocol and devices are in a file of their own; the variable follows the
    protocol, and the plan adds the devices."""
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
        rdma_devices=_rdma_devices_of_store,
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
        """Return the mapping, with the role's own side: a kv_consumer loads and does not store, a kv_producer does
        both.

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
