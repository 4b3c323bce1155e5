"""Variables of another tool's engines -> the env of a recipe."""

from __future__ import annotations

from pdserve.importing.launch import Launch, SourcedValue
from pdserve.recipe.flags import env_instead
from pdserve.recipe.load import show
from pdserve.roles import EngineRole

_HASH_SEED = "PYTHONHASHSEED"
_DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
_MOONCAKE = ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER", "MOONCAKE_LOCAL_HOSTNAME", "MOONCAKE_TE_META_DATA_SERVER")
_DYNAMO = ("DYN_", "DYNAMO_", "ETCD_", "NATS_")
_ANSWERS = ("DYN_TOOL_CALL_PARSER", "DYN_REASONING_PARSER", "DYN_DEFAULT_THINKING_MODE")
_SRTCTL, _NICS = "SRT_", "SRT_MOONCAKE_RANK_LOCAL_HCA_MAP"
_UNUSED_BY_VLLM = "read by Dynamo, which a recipe does not start"


def carry_over(env: dict[str, SourcedValue], launch: Launch, role: EngineRole | None) -> dict[str, SourcedValue]:
    """Return what of `env` a recipe has as it stands; the rest becomes notes of the launch. `role` None: all roles."""
    kept: dict[str, SourcedValue] = {}
    for name, at in env.items():
        instead = env_instead(name, role or "engine")
        if name == _HASH_SEED:
            launch.hash_seed = at
        elif name == _DEVELOPMENT:
            why = "opens development endpoints without a key; for a test: engine.cache_reset_endpoint: true"
            launch.note(at, why, "replaced")
        elif name in _ANSWERS:
            launch.note(at, "changes Dynamo's answers: write its flag (dyn-...) into the role's args", "served")
        elif name == _NICS:
            why = (
                "a NIC for each rank, by its name: here Mooncake chooses one of device_name; look that it is a near one"
            )
            launch.note(at, why, "confirm")
        elif name.startswith(_SRTCTL):
            launch.note(at, "a variable of srtctl: what it does with it is not known", "served")
        elif name.startswith(_DYNAMO):
            launch.note(at, _UNUSED_BY_VLLM, "unused")
        elif instead is not None or name in _MOONCAKE:
            launch.note(at, f"pdserve sets this variable: {instead or 'from the mooncake_store section'}", "replaced")
        elif show.secret_name(name) or show.secret_value(at.value):
            kept[name] = at.of({"secret": name})
            launch.note(SourcedValue(None, at.key, at.line), f"a secret: export {name} before `pdserve up`", "confirm")
        else:
            kept[name] = at.of(_text(at.value))
    return kept


def _text(value: object) -> str | int:
    """Return a value as the environment has it. A number that is written as it is read stays one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, int) else str(value)
