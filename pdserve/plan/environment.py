"""The environment of each process, as rules.

Engines inherit, because images carry what their libraries need; what would change an engine behind the plan's back is
unset. LMCache and the proxy get an allow-list: LMCache prints its environment on /env, and neither needs more.

ROCm reads ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL, and two of them
compose: the second filters what the first has left and renumbered, so that sites whose Slurm sets ROCR_VISIBLE_DEVICES
can end up with no device at all. vLLM on ROCm deprecates CUDA_VISIBLE_DEVICES (vllm#46636).

The ids of a Node are therefore those of the bare machine, not of a job's already filtered view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pdserve.errors import RecipeError
from pdserve.plan.placement import Instance
from pdserve.plan.ports import AssignedPorts
from pdserve.plan.process import Env
from pdserve.recipe import effective
from pdserve.recipe.base import EnvValue, SecretRef
from pdserve.recipe.connectors.base import EngineSide
from pdserve.recipe.connectors.registry import AnyConnector, RawSection, kinds_of
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.sections import Lmcache

Platform = Literal["cpu", "cuda", "rocm"]

DEVICE_VARIABLE: dict[Platform, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
"""The one variable of each platform. CPU has none."""

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def device_env(platform: Platform, devices: Sequence[int]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables to set and variables to unset. With no devices all are unset: CPU engines need none."""
    variable = DEVICE_VARIABLE.get(platform)
    setting = {variable: ",".join(str(device) for device in devices)} if variable and devices else {}
    return setting, tuple(name for name in DEVICE_VARIABLES if name not in setting)


ENGINE_KEY = "engine_key"
"""The one secret that no recipe names: every deployment makes it, at random, for its engines."""

ALLOW_UNKNOWN = "PDSERVE_PATCHES_ALLOW_UNKNOWN"
"""Names of patches, by commas, that are applied to unknown code too."""

PLUGIN = "pdserve"
"""Our entry in vLLM's group vllm.general_plugins."""

_ENGINE_UNSET = (
    # Instances that inherit it race for the same ports.
    "VLLM_PORT",
    # Another deployment's data parallelism, or a job script's torchrun.
    "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_DP_SIZE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    # Would open development endpoints that no recipe asked for.
    "VLLM_SERVER_DEV_MODE",
    # A foreign allow-list would leave our plugin, and so every patch, out.
    "VLLM_PLUGINS",
    # Select connectors and modes behind the plan's back.
    "LMCACHE_USE_UPSTREAM_MP",
    "LMCACHE_MP_TRANSFER_MODE",
    # Fixes the port that two engines of one host would then share.
    "MC_LEGACY_RPC_PORT_BINDING",
)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NO_PROXY = ("NO_PROXY", "no_proxy")
"""Both: curl and Python's urllib read the small one first, others the large one."""

_BASE_ALLOW = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONNOUSERSITE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
)

_LMCACHE_ALLOW = (
    *_BASE_ALLOW,
    "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
    "CUDA_HOME",
    "CUDA_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "ROCM_PATH",
    "HIP_PATH",
)

_LMCACHE_ALLOW_ON_ROCM = (*_LMCACHE_ALLOW, "HSA_*")
"""ROCm's runtime reads them. Engines inherit all of them from the image (vLLM's sets HSA_ENABLE_IPC_MODE_LEGACY=1), and
the server opens handles to device memory that the engines have made: it must run in the same modes."""


def engine_env(
    recipe: Recipe,
    instance: Instance,
    *,
    rank: int,
    ports: AssignedPorts,
    patches: Sequence[str],
    patch_record: str,
    connector: AnyConnector | None,
    hosts: Sequence[str],
) -> Env:
    """The environment of the instance's process of that rank. `hosts`: addresses of all nodes.

    Defaults, then the recipe's `engine.env` and the role's `env`, then what the plan alone decides.
    """
    share = instance.shares[rank]
    process = instance.process_name(rank)
    wanted, secrets = _values_and_secrets(effective.env_of(recipe, instance.role))
    devices, hidden = device_env(recipe.platform, share.devices)
    setting = {
        **_engine_defaults(recipe, connector),
        **wanted,
        **_no_proxy(wanted, secrets, hosts),
        "VLLM_HOST_IP": share.node.address,
        "PYTHONHASHSEED": str(recipe.engine.hash_seed),
        **patch_variables(recipe, patches, patch_record),
        **devices,
    }
    if "VLLM_PLUGINS" in setting:
        setting["VLLM_PLUGINS"] = _with_plugin(setting["VLLM_PLUGINS"])
    if recipe.engine.cache_reset_endpoint:
        setting["VLLM_SERVER_DEV_MODE"] = "1"
    for kind in kinds_of(connector):
        taken = {
            port.purpose: ports.range(instance.server_of(rank) if port.server_only else process, port.purpose)
            for port in kind.ports
        }
        first = instance.dp_ranks(rank).start
        side = EngineSide(share.node.address, taken, recipe.timeouts.transfer_abort_seconds, first)
        setting |= kind.environment(side)
    unset = tuple(name for name in (*_ENGINE_UNSET, *hidden) if name not in setting)
    return Env(base="inherit", unset=unset, set=setting, secrets={**secrets, "VLLM_API_KEY": ENGINE_KEY})


def patch_variables(recipe: Recipe, patches: Sequence[str], record: str) -> dict[str, str]:
    """Return the variables that patches/plugin.py and patches/lmcache_server_main.py read. `record`: the folder where
    the active patches are recorded. Named also when there are none: the launcher's own environment must not decide."""
    allowed = [name for name in recipe.allow_unknown_upstream if name in patches]
    return {
        "PDSERVE_PATCHES": ",".join(patches),
        "PDSERVE_PATCH_RECORD": record,
        **({ALLOW_UNKNOWN: ",".join(allowed)} if allowed else {}),
    }


def setup_env(recipe: Recipe, hosts: Sequence[str]) -> Env:
    """Return what the recipe gives the engines of all roles. No device is hidden: a command may look at all of them."""
    outer = recipe.container.env if recipe.container is not None else {}
    wanted, secrets = _values_and_secrets({**outer, **recipe.engine.env})
    setting = {"PYTHONUNBUFFERED": "1", **wanted, **_no_proxy(wanted, secrets, hosts)}
    return Env(base="inherit", set=setting, secrets=secrets)


def weights_env(recipe: Recipe, role: Role, hosts: Sequence[str]) -> Env:
    """Return what the recipe gives the engines of a role, its secrets (HF_TOKEN) too: the same cache, hub and way
    there."""
    wanted, secrets = _values_and_secrets(effective.env_of(recipe, role))
    setting = {"PYTHONUNBUFFERED": "1", **wanted, **_no_proxy(wanted, secrets, hosts)}
    return Env(base="inherit", set=setting, secrets=secrets)


def lmcache_env(recipe: Recipe, section: Lmcache, devices: Sequence[int]) -> Env:
    """`devices`: those of all engines that attach; LMCache finds a device by its UUID, so numbering may differ."""
    wanted, secrets = _values_and_secrets(section.env)
    if secrets:
        name = next(iter(secrets))
        raise RecipeError(
            f"{name} of the LMCache server cannot be a secret: its /env endpoint prints the whole environment",
            where=f"lmcache.env.{name}",
        )
    setting = {
        "PYTHONUNBUFFERED": "1",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_TRACK_USAGE": "false",
        **wanted,
        "PYTHONHASHSEED": str(recipe.engine.hash_seed),
        **device_env(recipe.platform, devices)[0],
    }
    allow = _LMCACHE_ALLOW_ON_ROCM if recipe.platform == "rocm" else _LMCACHE_ALLOW
    return Env(base="allow", allow=_names_not_set(allow, setting), set=setting)


def store_master_env() -> Env:
    """It needs nothing of the agent's environment."""
    return Env(base="allow", allow=_BASE_ALLOW, set={"PYTHONUNBUFFERED": "1"})


def proxy_env() -> Env:
    """Allow no http_proxy and the like: its upstreams are our own engines."""
    return Env(
        base="allow", allow=_BASE_ALLOW, set={"PYTHONUNBUFFERED": "1"}, secrets={"PDSERVE_ENGINE_KEY": ENGINE_KEY}
    )


def vllm_router_env() -> Env:
    """It reads the engines' key from the variable that OpenAI's clients read theirs from."""
    return proxy_env().model_copy(update={"secrets": {"OPENAI_API_KEY": ENGINE_KEY}})


def _engine_defaults(recipe: Recipe, connector: AnyConnector | None) -> dict[str, str]:
    """Variables that a recipe may override."""
    setting = {
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        # The API server gives its engine 600 s and then exits, whatever the recipe's own timeout is.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(recipe.timeouts.engine_seconds)),
    }
    if recipe.model.path is not None:
        # The model is a folder, so whatever else is looked up must be there too.
        setting["HF_HUB_OFFLINE"] = "1"
    for leaf in effective.leaf_connectors(connector):
        if not isinstance(leaf, RawSection):
            setting |= leaf.default_environment()
    return setting


def _no_proxy(wanted: Mapping[str, str], secrets: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """Keeps engines from talking to each other through the site's proxy, which vLLM's Mooncake otherwise does: it
    registers at its own bootstrap server with a client that obeys http_proxy.

    The proxy variables themselves stay, a download from the hub may need them. An inherited NO_PROXY is replaced,
    because a plan cannot know it; what else must not go through the proxy belongs into the recipe's env.
    """
    chosen = [host.strip() for name in _NO_PROXY for host in wanted.get(name, "").split(",")]
    # A star excludes everything, and for curl only when it stands alone.
    value = "*" if "*" in chosen else ",".join(dict.fromkeys(filter(None, (*chosen, *_LOOPBACK, *hosts))))
    return {name: value for name in _NO_PROXY if name not in secrets}


def _values_and_secrets(env: Mapping[str, EnvValue]) -> tuple[dict[str, str], dict[str, str]]:
    """Plain values as text, and variable -> name of the secret."""
    plain = {name: str(value) for name, value in env.items() if not isinstance(value, SecretRef)}
    return plain, {name: value.secret for name, value in env.items() if isinstance(value, SecretRef)}


def _with_plugin(plugins: str) -> str:
    names = [name for name in plugins.split(",") if name]
    return ",".join(names if PLUGIN in names else [*names, PLUGIN])


def _names_not_set(allow: Sequence[str], setting: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in allow if name not in setting)
