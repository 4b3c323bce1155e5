"""A scriptable stand-in for vLLM's API server: its argv, its endpoints, its Mooncake and NIXL, and every way to fail.

    python tests/fakes/engine.py [serve MODEL] --model M --host H --port P --served-model-name N
        --kv-transfer-config JSON --block-size 16 --data-parallel-size 1 --max-model-len 100000
        --enable-prompt-tokens-details --api-key K           (unknown flags are ignored)

VLLM_API_KEY guards /v1; VLLM_MOONCAKE_BOOTSTRAP_PORT, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT and
VLLM_NIXL_SIDE_CHANNEL_PORT as in vLLM.
Faults are scripted by environment (details in engine_script.Script):

FAKE_READY_AFTER=S        listens only after S seconds         FAKE_NEVER_READY=1      lives, never listens
FAKE_DIE_AT=WHEN          import, load, ready or request       FAKE_EXIT_CODE=N        how it then exits (1)
FAKE_DIE_IF=PATH          dies at once if PATH exists
FAKE_LAST_LINES=TEXT      printed to stderr before that        FAKE_PROGRESS=TEXT      printed while it loads
FAKE_IGNORE_TERM=1        only KILL ends it                    FAKE_SHM=1|leak         maps /dev/shm/psm_<hex>
FAKE_CHILD=1|setsid       an EngineCore that outlives us       FAKE_WRONG_KV=1         computes on other KV
FAKE_CHILD=daemon         one that leaves parent, session and environment, and logs its PID
FAKE_DUMMY_WEIGHTS=1          output ignores the prompt       FAKE_IGNORE_SALT=1     caches are not kept apart
FAKE_PREFILL_SECONDS=S    time of a prefill                    FAKE_TOKEN_SECONDS=S    time of a token
FAKE_PREFILL_STATUS=N     prefill legs are refused so          FAKE_DECODE_STATUS=N    all others are refused so
FAKE_EOS=1|2              1st token EOS (2: always)             FAKE_DROP_AFTER=N       cuts streams after N tokens
FAKE_KV_FAILS=1           decode cannot load KV                FAKE_STORE_FAILS=1      the Mooncake store takes nothing
FAKE_KEEPS_NOTHING=1      NIXL: prefill keeps no KV
FAKE_HOLD=POINT           waits at arrival, prefill, first, token, answer or metrics until changed over /fake/script

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
