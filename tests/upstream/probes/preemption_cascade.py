"""Whether two requests preempt each other for ever. See test_simulation."""

from __future__ import annotations

import json

from tests.upstream.probes.simulation import preemption_cascade

if __name__ == "__main__":
    print(json.dumps(preemption_cascade()))
