"""What only a model with experts can do, refused for others before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.errors import RecipeError
from pdserve.models.config_json import texts
from pdserve.recipe.model import Recipe

_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", "block_configs")
"""The keys that vLLM 0.32 reads (transformers_utils/model_arch_config_convertor.py)."""


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model is a mixture of experts."""
    return any(text.get(key) for text in texts(config) for key in _COUNTS)


def check(recipe: Recipe, config: Mapping[str, Any] | None) -> None:
    """Raises RecipeError. `config`: the model's config.json; None where it is not at hand, and nothing is refused."""
    if config is None or has_experts(config):
        return
    for name, role in recipe.roles():
        if role.parallel.load_balancing == "external":
            raise RecipeError(
                "this model has no experts, and without them vLLM refuses external load balancing",
                where=f"{name}.parallel.load_balancing",
                cause=f"config.json has none of {', '.join(_COUNTS)}: its ranks would not depend on each other",
                todo=f"write `instances: {role.instances * role.parallel.dp}` with dp 1: that is the same",
            )
