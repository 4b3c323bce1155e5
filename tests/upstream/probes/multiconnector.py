"""All probes of MultiConnector in one process: importing vLLM takes longer than any of them."""

from __future__ import annotations

import json

from tests.upstream.probes import multiconnector_lmcache, multiconnector_metrics, multiconnector_selection


def main() -> None:
    # In this order: each patches what the ones before have seen unpatched.
    results = {}
    for probe in (multiconnector_selection, multiconnector_lmcache, multiconnector_metrics):
        results[probe.__name__.rpartition("_")[2]] = probe.measure()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
