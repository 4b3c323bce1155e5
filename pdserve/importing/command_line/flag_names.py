"""The names by which flags of vLLM are read: those of a list, or those of an installed version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.recipe.vllm_names import FLAGS, LISTS, SWITCHES


@dataclass(frozen=True)
class FlagNames:
    """Names without dashes."""

    whole: frozenset[str]
    short: Mapping[str, str]
    """Short name -> the whole one."""
    switches: frozenset[str] = frozenset()
    """Flags that take no value, where that is known."""
    lists: frozenset[str] = frozenset()
    """Flags that take any number of words."""

    def named(self, name: str) -> str:
        """The whole name: no dashes in front, `-` for `_`, a short name or a unique beginning written out. What comes
        after a dot is a key of a JSON object and stays as it is."""
        short = name.startswith("-") and not name.startswith("--")
        first, dot, rest = name.lstrip("-").partition(".")
        first = self.short.get(first, first) if short else first.replace("_", "-")
        bare = first.removeprefix("no-")
        if bare not in self.whole and len(bare) > 3:
            fitting = [known for known in self.whole if known.startswith(bare)]
            if len(fitting) == 1:
                first = first.removesuffix(bare) + fitting[0]
        return f"{first}{dot}{rest}"

    def most_words(self, name: str) -> int | None:
        """How many words can follow the flag, as it is written. None: any number, or it is not known."""
        known = self.named(name).partition(".")[0]
        if known.removeprefix("no-") in self.switches:
            return 0
        return 1 if known in self.whole and known not in self.lists else None

    def switched_off(self, name: str) -> str | None:
        """The flag that `no-x` turns off."""
        bare = name.removeprefix("no-")
        return bare if bare != name and bare in self.whole else None


LISTED = FlagNames(
    FLAGS,
    {
        "asc": "api-server-count",
        "tp": "tensor-parallel-size",
        "pp": "pipeline-parallel-size",
        "dp": "data-parallel-size",
        "ep": "enable-expert-parallel",
        "dpn": "data-parallel-rank",
        "dpr": "data-parallel-start-rank",
        "dpl": "data-parallel-size-local",
        "dpa": "data-parallel-address",
        "dpp": "data-parallel-rpc-port",
        "dpb": "data-parallel-backend",
        "dph": "data-parallel-hybrid-lb",
        "dpe": "data-parallel-external-lb",
        "dpm": "data-parallel-multi-port-external-lb",
        "dcp": "decode-context-parallel-size",
        "pcp": "prefill-context-parallel-size",
        "n": "nnodes",
        "r": "node-rank",
        "q": "quantization",
        "sc": "speculative-config",
        "cc": "compilation-config",
        "ac": "attention-config",
        "dc": "diffusion-config",
        "O": "optimization-level",
    },
    SWITCHES,
    LISTS,
)
"""Those of vLLM 0.32.0 (recipe/vllm_names.py; the short names from its engine/arg_utils.py)."""
