"""Whether the engines of a recipe open RDMA devices, known before there is a plan: a container must be given them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdserve.recipe import effective
from pdserve.recipe.base import SecretRef
from pdserve.recipe.connectors.base import Config, Context
from pdserve.recipe.connectors.registry import KINDS, AnyConnector, RawSection, leaf_configs
from pdserve.recipe.model import Recipe
from pdserve.roles import EngineRole

VERBS = "/dev/infiniband"
"""The folder of the device files that RDMA is used through."""


def uses_rdma(recipe: Recipe) -> bool:
    """True where a connector of any role moves KV by RDMA, by its own default too."""
    for name, role, connector in effective.roles(recipe):
        variables = _variables(connector, effective.env_of(recipe, role))
        for config in _configs(recipe, name, connector):
            kind = KINDS.get(str(config.get("kv_connector", "")))
            if kind is not None and kind.rdma_devices(config, variables) is not None:
                return True
    return False


def _configs(recipe: Recipe, name: EngineRole, connector: AnyConnector | None) -> Iterator[Config]:
    for leaf in effective.leaves(connector):
        if isinstance(leaf, RawSection):
            yield from leaf_configs(leaf.config)
        elif not leaf.ABOUT.attaches_lmcache:  # its mapping needs the ports of a plan, and it reaches its own node only
            yield leaf.config(Context(name, recipe.platform, recipe.lmcache, ()))


def _variables(connector: AnyConnector | None, env: Mapping[str, object]) -> dict[str, str]:
    """What of the engines' environment decides it: a connector's defaults, then the recipe's values."""
    defaults = [leaf.default_environment() for leaf in effective.leaves(connector) if not isinstance(leaf, RawSection)]
    plain = {name: str(value) for name, value in env.items() if not isinstance(value, SecretRef)}
    return {**{name: value for setting in defaults for name, value in setting.items()}, **plain}
