"""What the laboratory says when it cannot do its work."""

from __future__ import annotations


class LabError(RuntimeError):
    """This machine lacks something, or a part of the cluster did not come up. The message says which and where."""
