"""The compiled parts of lmcache for sources that were put first on the path: sdists have none.

The installed release's extension stands in. Only names and enums of it matter to the scheduler's half of the connector.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

import torch  # noqa: F401  # the extension needs its libraries


def borrow() -> None:
    """Call before lmcache is imported; nothing happens where lmcache is the installed one."""
    installed = Path(sysconfig.get_path("purelib")) / "lmcache"
    spec = importlib.util.find_spec("lmcache")
    if spec is None or not spec.submodule_search_locations or Path(spec.submodule_search_locations[0]) == installed:
        return
    for library in installed.glob("lmcache_native*.so"):
        native = importlib.util.spec_from_file_location("lmcache.lmcache_native", library)
        assert native is not None
        assert native.loader is not None
        sys.modules[native.name] = importlib.util.module_from_spec(native)
        native.loader.exec_module(sys.modules[native.name])
