"""What happens when a process dies while others serve: `restart:` of a role and of the proxy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.recipe.base import Count, Seconds, Strict


class RestartPolicy(Strict):
    """What happens when one instance of a role dies while others serve."""

    policy: Literal["never", "on-failure"] = Field(
        default="never",
        description="never: a dead instance stays dead, the deployment is degraded, and `pdserve restart` revives it. "
        "on-failure: it is started again, with back-off. Off by default: a crash loop would hide its cause.",
    )
    max: Count = Field(default=3, description="Restarts of one process before it stays dead.")
    backoff_seconds: Seconds = Field(default=2, description="Before the first restart; doubles each time.")
    backoff_max_seconds: Seconds = Field(default=60, description="The longest pause between two restarts.")
