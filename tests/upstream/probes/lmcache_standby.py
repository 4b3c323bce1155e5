"""An LMCache server that has imported everything and begins when it is told to: `python -m ... FLAGS`, a line on stdin.

Stands in for a restart that is faster than any real one. PDSERVE_PATCHES as for lmcache_server_main.
"""

from __future__ import annotations

import sys

import lmcache.v1.multiprocess.http_server  # noqa: F401

from pdserve.patches import lmcache_server_main

if __name__ == "__main__":
    print("warm", flush=True)
    sys.stdin.readline()
    lmcache_server_main.main()
