"""Folders in which compiled kernels outlive a run: which variables lead there, and what names a folder.

Each name was read where it is used: VLLM_CACHE_ROOT in vllm/envs.py, TRITON_CACHE_DIR in triton/knobs.py,
TORCHINDUCTOR_CACHE_DIR in torch/_inductor/runtime/cache_dir_utils.py (vLLM 0.32 points it below VLLM_CACHE_ROOT by
itself, in compilation/compiler_interface.py), AITER_JIT_DIR in aiter/jit/core.py of ROCm/aiter, which is not installed
on a machine without ROCm, and FLASHINFER_WORKSPACE_BASE in flashinfer/jit/env.py.

AITER loads compiled modules from AITER_JIT_DIR alone once it is set, so what an image has built before does not count:
the first start with an empty folder compiles them all.
"""

from __future__ import annotations

import posixpath

from pdserve.plan.nodes.image import named_after
from pdserve.recipe.container_options import Platform

_EVERYWHERE = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_ON: dict[Platform, dict[str, str]] = {
    "cpu": {},
    "cuda": {"FLASHINFER_WORKSPACE_BASE": "flashinfer"},
    "rocm": {"AITER_JIT_DIR": "aiter"},
}


def cache_folder(root: str, *, image: str, model: str) -> str:
    """Of one image and one model: what another compiler built must not be loaded."""
    return posixpath.join(root, named_after(image, model))


def cache_variables(folder: str, platform: Platform) -> dict[str, str]:
    """Variables of everything that runs in the container."""
    return {name: posixpath.join(folder, part) for name, part in {**_EVERYWHERE, **_ON[platform]}.items()}


def make_argv(folder: str) -> tuple[str, ...]:
    """Makes it as the user's own, before a container would make it as root's."""
    return ("mkdir", "-p", "-m", "0700", folder)


def look_argv(folder: str) -> tuple[str, ...]:
    """Prints `owner UID MODE`, and `file` where there is any."""
    return (
        *("find", folder, "(", "-path", folder, "-printf", "owner %U %m\\n", ")"),
        *("-o", "(", "-type", "f", "-printf", "file\\n", "-quit", ")"),
    )
