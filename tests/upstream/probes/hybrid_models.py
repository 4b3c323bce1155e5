"""Which of the families in tests/models/families.py keep recurrent state, by vLLM's own classes."""

from __future__ import annotations

import json

from vllm.model_executor.models.interfaces import has_inner_state, is_hybrid
from vllm.model_executor.models.registry import ModelRegistry

from tests.models.families import FAMILIES


def main() -> None:
    results = {}
    for family in FAMILIES:
        registered = ModelRegistry.models.get(family.architecture)
        # Multimodal classes need torchvision, which the CPU stack cannot have.
        if registered is not None and not family.architecture.endswith("ForConditionalGeneration"):
            cls = registered.load_model_cls()
            # Mamba alone has state and no attention beside it.
            results[family.architecture] = bool(is_hybrid(cls) or has_inner_state(cls))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
