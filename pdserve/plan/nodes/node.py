"""A machine of a plan."""

from __future__ import annotations

from pdserve.plan.frozen import Frozen
from pdserve.plan.nodes.reach import Local, Reach


class Node(Frozen):
    """A machine as the planner sees it. `devices`: ids that may be used (empty on CPU)."""

    name: str
    address: str = "127.0.0.1"
    devices: tuple[int, ...] = ()
    hostname: str | None = None
    """What `hostname` prints there; None: not known yet."""
    reach: Reach = Local()
    """How its agent is started."""
    command: tuple[str, ...] = ()
    """What runs the agent there: an interpreter, or a container with one. (): the launcher's own interpreter."""
    agent: tuple[str, ...] = ()
    """The whole line that starts the agent from here, through docker, srun or ssh, to be shown. (): not known yet, or
    a child of the launcher."""

    def python(self, otherwise: str) -> str:
        """The interpreter there, which stands last in `command`; `otherwise`: where nothing is known of it."""
        return self.command[-1] if self.command else otherwise
