"""The section `logs`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pdserve.recipe.base import Strict


class Logs(Strict):
    """How large the log of one process may become. Its writer is never interrupted."""

    max_mib: Annotated[int, Field(ge=0)] = Field(
        default=256,
        description="A log that is larger is cut: what it held goes to NAME.log.1, and that of before to NAME.log.2, "
        "... 0: never. Where no copy fits on the disk, the end of the log is kept and the rest is lost.",
    )
    keep: Annotated[int, Field(ge=0)] = Field(
        default=3, description="How many of the files that were cut off are kept, for each process."
    )
