"""A scriptable stand-in for vLLM's API server: its argv, its endpoints, its Mooncake and NIXL, and every way to fail.

    python tests/fakes/engine.py [serve MODEL] --model M --host H --port P --served-model-name N
        --kv-transfer-config JSON --block-size 16 --data-parallel-size 1 --max-model-len 100000
        --enable-prompt-tokens-details --api-key K           (unknown flags are ignored)

VLLM_API_KEY guards /v1; VLLM_MOONCAKE_BOOTSTRAP_PORT, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and
VLLM_NIXL_SIDE_CHANNEL_PORT as in vLLM.
Faults are scripted by environment: FAKE_READY_AFTER, FAKE_DIE_AT and so on, one for each field of
engine_script.Script; over /fake/script some of them can be changed while it runs.

With FAKE_LMCACHE_URL=http://host:port (HTTP side of tests/fakes/lmcache.py) an LMCache connector reports there what it
stores and loads.

It outlives whoever started it: that is one of the things that tests are about.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Started by path, from any folder: the repository, not this folder, is where modules come from.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.fakes.engine_process import main  # noqa: E402

if __name__ == "__main__":
    main()
