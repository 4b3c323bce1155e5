"""Whether the prompts of a measurement were new to every cache. Pure.

Each run of the client has a `cache_salt` of its own (`pdserve.bench.clients`). vLLM and LMCache key a block by it, so
that what an earlier point left cannot be loaded, also where it could not be removed (pdserve.sweep.empty). What the
engines counted is the proof: how many tokens of prompts came from a cache.
"""

from __future__ import annotations

from pdserve.bench.result import Measurement
from pdserve.bench.validity import Reason

CHECK = "cold-cache"
WARM_SHARE = 0.5
"""Of all prompt tokens. Every run has the same prompts (one seed): without an effect of the salt nearly all blocks
would come from a cache. Random prompts of one run share blocks with each other where the vocabulary is small: 13 % with
that of recipes/tiny-cpu.yaml and 32 prompts."""


def cold(measurement: Measurement, theory: float = 0.0) -> tuple[Reason | None, Reason | None]:
    """Why it is INVALID, and why it could not be checked. `theory`: the share that a trace repeats itself, which a cold
    cache has too; the limit is of the rest."""
    prefill, decode = measurement.window.prefill, measurement.window.decode
    if "computed" not in prefill or "local_hits" not in prefill:
        text = "the engines do not count where the tokens of their prompts came from"
        return None, Reason(check=CHECK, text=text)
    # What prefill received came from a cache tier; what decode received is the transfer itself.
    on_prefill = prefill["local_hits"] + prefill.get("received", 0.0)
    # The prompt of a session's next turn may be in both.
    warm = max(on_prefill, decode.get("local_hits", 0.0))
    asked = measurement.figures.input_tokens
    if warm <= (theory + WARM_SHARE * (1 - theory)) * asked:
        return None, None
    new = "whose prompts were all new" if not theory else f"and {theory:.0%} repeat earlier ones of the trace"
    text = f"{warm:.0f} of {asked} prompt tokens came from a cache, {new}: it was not cold"
    return Reason(check=CHECK, text=text), None
