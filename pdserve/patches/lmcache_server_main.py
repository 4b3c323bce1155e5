"""`python -m pdserve.patches.lmcache_server_main FLAGS`: LMCache's MP server with the patches of PDSERVE_PATCHES.

LMCache has no plugin system. This module is the least that can stand in for one: it applies the patches, or ends the
process with what is wrong, and then becomes the server's own module, with the same argv.
"""

from __future__ import annotations

import os
import runpy
import sys

from pdserve.errors import PdserveError
from pdserve.patches.loader import load_named

SERVER = "lmcache.v1.multiprocess.http_server"


def main() -> None:
    """Exit code 4 and one line `StartError: patch ...` when a patch cannot be applied."""
    named = os.environ.get("PDSERVE_PATCHES", "").split(",")
    try:
        load_named(
            named,
            allow_unknown=os.environ.get("PDSERVE_PATCHES_ALLOW_UNKNOWN", "").split(","),
            folder=os.environ.get("PDSERVE_PATCH_RECORD"),
        )
    except PdserveError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
