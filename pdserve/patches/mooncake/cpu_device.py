"""Patch mooncake-cpu-device: MooncakeConnector starts where there is no accelerator."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.patches.patch import Patch, PatchTarget, wrap

_NAME = "mooncake-cpu-device"


def apply() -> None:
    """Wraps torch.accelerator.current_device_index; with an accelerator it answers as before.

    The index goes to current_platform.set_device next, which on vLLM's CPU platform is torch.cpu.set_device: a no-op.
    """
    import torch

    wrap(torch.accelerator, "current_device_index", patch=_NAME, around=_index_or_zero)


def _index_or_zero(original: Callable[[], int]) -> Callable[[], int]:
    def current_device_index() -> int:
        import torch

        return original() if torch.accelerator.is_available() else 0

    return current_device_index


PATCH = Patch(
    name=_NAME,
    behaviour="CPU without accelerator",
    summary=(
        "MooncakeConnector's worker asks torch for the index of the current accelerator when it is built, and torch "
        "raises where there is none, although the transfer engine moves host memory over TCP. Without an accelerator "
        "the index is 0; with an accelerator nothing changes."
    ),
    issue="not reported upstream; MooncakeConnectorWorker.__init__ of vllm 0.26 to 0.33",
    targets=(PatchTarget("torch.accelerator.current_device_index"),),
    runs_in=("worker",),
    connectors=frozenset({"MooncakeConnector"}),
    platforms=("cpu",),
    required=True,
    instead="connectors of kind nixl in place of mooncake",
    remove_when="MooncakeConnectorWorker takes its device from the platform instead of torch.accelerator",
    apply=apply,
)
