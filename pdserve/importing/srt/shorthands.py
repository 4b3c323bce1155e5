"""srt-slurm's names of connectors (`connector: nixl`), and the --kv-transfer-config that srtctl makes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.roles import EngineRole

_OF_ALL_ROLES: Mapping[str, Mapping[str, Any]] = {
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    "lmcache": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
    "lmcache-mp": {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"},
}
_MORIIO = "moriio"
_MORIIO_SIDES: Mapping[EngineRole, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""srtctl refuses it for an aggregated role (its docs/vllm-router.md, as of September 2026)."""

NAMES = (*_OF_ALL_ROLES, _MORIIO)


def transfer_config(name: str, role: EngineRole) -> Mapping[str, Any] | None:
    """The mapping that srtctl gives an engine of this role, without the addresses and ports that it fills in at the
    start. None for a name that is not known, or not for this role."""
    if name.lower() == _MORIIO and (side := _MORIIO_SIDES.get(role)):
        return {
            "kv_connector": "MoRIIOConnector",
            "kv_role": side,
            "kv_connector_extra_config": {"read_mode": True},
        }
    return _OF_ALL_ROLES.get(name.lower())
