"""`python -m pdserve.weights`: the process of a plan that fetches a model."""

from __future__ import annotations

import sys

from pdserve.weights.download import main

if __name__ == "__main__":
    sys.exit(main())
