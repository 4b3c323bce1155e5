"""What config.json is read to say of recurrent state, beside what vLLM's own classes of those models say."""

from __future__ import annotations

from pdserve.models.kinds import hints_of
from tests.models.families import FAMILIES
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    from vllm.model_executor.models.interfaces import has_inner_state, is_hybrid
    from vllm.model_executor.models.registry import ModelRegistry


@on(INSTALLED_VLLM)
def test_vllms_classes_keep_state_exactly_where_the_config_is_read_to_say_so() -> None:
    theirs, ours = {}, {}
    for family in FAMILIES:
        registered = ModelRegistry.models.get(family.architecture)
        # Multimodal classes need torchvision, which the CPU stack cannot have.
        if registered is not None and not family.architecture.endswith("ForConditionalGeneration"):
            cls = registered.load_model_cls()
            # Mamba alone has state and no attention beside it.
            theirs[family.architecture] = bool(is_hybrid(cls) or has_inner_state(cls))
            ours[family.architecture] = hints_of(family.config).recurrent
    assert theirs == ours
    assert len(theirs) >= 15
