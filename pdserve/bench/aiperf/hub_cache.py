"""A model's folder as AIPerf reads it everywhere: as an entry of a cache of Hugging Face's hub.

AIPerf 0.13.0 makes the prompts of ten or more lines with hash ids in processes that are offline. There it takes every
tokenizer for an id of the hub (`Tokenizer._resolve_local_snapshot`, `parallel_decode._init_worker`), refuses a folder,
and the run ends before it begins. This can go when it takes a folder there.
"""

from __future__ import annotations

import re
from pathlib import Path

_COMMIT = "0" * 40


def put_into_cache(folder: Path, cache: Path) -> str:
    """The id that `folder` has in `cache`, offline: nothing of it is copied. Raises OSError."""
    # The hub's ids have letters, digits, and single dashes and dots.
    name = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-")[:80] or "model"
    entry = cache / f"models--folder--{name}"
    (entry / "snapshots").mkdir(parents=True, mode=0o700)
    (entry / "refs").mkdir(mode=0o700)
    (entry / "refs" / "main").write_text(_COMMIT, encoding="ascii")
    (entry / "snapshots" / _COMMIT).symlink_to(folder.resolve(), target_is_directory=True)
    return f"folder/{name}"
