"""Both probes of MultiConnector in one process: importing vLLM takes longer than either."""

from __future__ import annotations

import json

from tests.upstream.probes import multiconnector_metrics, multiconnector_selection


def main() -> None:
    # The selection first: the other one patches what it finds.
    selection = multiconnector_selection.measure()
    print(json.dumps({"selection": selection, "metrics": multiconnector_metrics.measure()}))


if __name__ == "__main__":
    main()
