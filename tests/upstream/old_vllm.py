"""Import this before vllm: what its older releases need and later ones no longer install."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).with_name("stand_ins")

if importlib.util.find_spec("gguf") is None:
    # Before 0.23 vllm imports gguf, also in the subprocess that looks at the model's class.
    sys.path.append(str(STAND_INS))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(STAND_INS))))
