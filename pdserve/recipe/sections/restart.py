"""What happens when a process dies while others serve: `restart:` of a role and of the proxy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.recipe.base import Count, Seconds, Strict


class RestartPolicy(Strict):
    """What happens when one instance of a role dies while others serve."""

    policy: Literal["never", "on-failure"] = Field(
        default="on-failure",
        description="on-failure: a dead instance is started again, with back-off; once `max` restarts within "
        "`window_seconds` did not help, it stays dead. never: it stays dead at once, and `pdserve restart` revives it. "
        "A dead instance makes the deployment degraded; the last one of its role ends it.",
    )
    max: Count = Field(default=3, description="Restarts of one process within `window_seconds` before it stays dead.")
    window_seconds: Seconds = Field(default=600, description="Restarts that are longer ago do not count.")
    backoff_seconds: Seconds = Field(default=2, description="Before the first restart; doubles each time.")
    backoff_max_seconds: Seconds = Field(default=60, description="The longest pause between two restarts.")
