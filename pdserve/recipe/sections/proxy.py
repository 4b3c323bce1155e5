"""The `proxy:` section: the process that clients talk to. Most of it is the proxy's own configuration (pd.serving)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.pd.config.serving import Serving
from pdserve.recipe.base import Count
from pdserve.recipe.sections.restart import RestartPolicy


class Proxy(Serving):
    """The prefill/decode proxy: what clients talk to."""

    kind: Literal["pdserve", "vllm-router"] = Field(
        default="pdserve",
        description="Which proxy: pdserve's own, or the official Rust router (`pip install 'pdserve[router]'`), which "
        "has fewer of these settings; see docs/vllm-router.md.",
    )
    workers: Count = Field(
        default=1,
        description="Processes that share the port and one view of load and limits; one keeps one core busy.",
    )
    restart: RestartPolicy = Field(
        default=RestartPolicy(policy="on-failure"),
        description="The proxy keeps no state and starts in a second, so it is restarted by default.",
    )
    command: list[str] | None = Field(
        default=None, min_length=1, description="Replaces `python -m pdserve.proxy`, or `vllm-router`."
    )
