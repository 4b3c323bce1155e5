"""What config.json is read to say of recurrent state, beside what vLLM's own classes of those models say."""

from __future__ import annotations

import pytest

from pdserve.models.kinds import hints_of
from tests.models.families import FAMILIES
from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


def test_vllms_classes_keep_state_exactly_where_the_config_is_read_to_say_so() -> None:
    theirs: dict[str, bool] = probe(INSTALLED_VLLM, "tests.upstream.probes.hybrid_models")
    ours = {family.architecture: hints_of(family.config).recurrent for family in FAMILIES}
    assert theirs == {name: ours[name] for name in theirs}
    assert len(theirs) >= 15
