"""How many instances of which size: by the planner where the weights are known, else by a default that says so.

An instance stays on one node. Sizes are powers of two, as the heads and experts of models are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pdserve.errors import RecipeError
from pdserve.models.kv_cache import NULL_BLOCK
from pdserve.sizing.engines import BESIDE_KV_GIB, Sized
from pdserve.sizing.given import GIB
from pdserve.starter.goal import Goal
from pdserve.starter.wish import InitChoice

WANTED_REQUESTS = 4
"""Requests of max-model-len that an instance should hold at once, where a larger one can."""

Size = Callable[["Layout"], Sized | None]
"""The planner on a layout; None: it does not know the model."""


@dataclass(frozen=True)
class Layout:
    """Instances of a recipe. `decode` is 0 where one engine does both."""

    tp: int
    prefill: int
    decode: int
    reason: str
    """Of `tp`."""
    sized: Sized | None = None

    @property
    def aggregated(self) -> bool:
        """Whether there is room for one instance only."""
        return self.decode == 0


def choose(wish: InitChoice, size: Size) -> Layout:
    """Raises RecipeError where no instance on one node can hold the weights and a request."""
    if wish.hardware.platform == "cpu":
        return _on_cpu(wish, size)
    splits = [_split(wish, tp) for tp in _sizes(wish)]
    widest = max((split for split in splits if not split.aggregated), key=lambda split: split.tp, default=splits[0])
    tried = [(split, size(split)) for split in splits]
    known = [(split, sized) for split, sized in tried if sized is not None and sized.size.weights_bytes is not None]
    if not known:
        return Layout(
            widest.tp,
            widest.prefill,
            widest.decode,
            "NOT CHECKED: the weights are not known on this machine; this is the largest that the nodes have room for",
            dict(tried)[widest],
        )
    fits = [entry for entry in known if _holds_one(entry[1])]
    if not fits:
        raise _too_large(wish, known[-1][1])
    apart = [entry for entry in fits if not entry[0].aggregated] or fits
    full = [entry for entry in apart if _requests(entry[1]) >= WANTED_REQUESTS]
    split, sized = (full or apart)[0]
    if wish.goal is Goal.LATENCY and widest.tp > split.tp:
        split, sized = next(entry for entry in known if entry[0] == widest)
        why = "the largest that the nodes have room for: more devices work on each token"
    else:
        why = "the smallest that holds the weights and leaves KV: most instances"
    return Layout(split.tp, split.prefill, split.decode, why, sized)


def numbers(wish: InitChoice, sized: Sized) -> str:
    """The planner's, of one rank and one instance."""
    size = sized.size
    weights, requests = size.weights_bytes, size.requests
    held = "weights not known" if weights is None else f"{weights.high / GIB:.3g} of {wish.hardware.device_gib:g} GiB"
    if requests is None:
        return f"weights of a rank {held}"
    return f"weights of a rank {held}; {requests.low:.1f} to {requests.high:.1f} requests of {size.model_len} tokens"


def _on_cpu(wish: InitChoice, size: Size) -> Layout:
    """The weights are in host memory, which preflight looks at; the memory for KV is stated in the recipe."""
    plain = Layout(1, 1, 1, "a CPU engine is one rank")
    sized = size(plain)
    if sized is not None and sized.size.kv_bytes is not None and not _holds_one(sized):
        raise _too_long(wish, sized, sized.size.kv_bytes.high / GIB)
    return replace(plain, sized=sized)


def _sizes(wish: InitChoice) -> Iterator[int]:
    tp = 1
    while tp <= wish.devices:
        if wish.heads is None or wish.heads % tp == 0:
            yield tp
        tp *= 2


def _split(wish: InitChoice, tp: int) -> Layout:
    instances = wish.nodes * (wish.devices // tp)
    if instances == 1:
        return Layout(tp, 1, 0, "")
    small, large = instances // 2, instances - instances // 2
    # Agents send long prompts and get short answers.
    return Layout(tp, large, small, "") if wish.goal is Goal.AGENTS else Layout(tp, small, large, "")


def _requests(sized: Sized) -> float:
    """At the planner's cautious end."""
    return 0 if sized.size.requests is None else sized.size.requests.low


def _holds_one(sized: Sized) -> bool:
    """A request of max-model-len, beside the block that vLLM keeps for itself; at the planner's cautious end."""
    blocks = sized.size.blocks
    return blocks is not None and sized.cache.blocks_a_request <= int(blocks.low) - NULL_BLOCK


def _too_long(wish: InitChoice, sized: Sized, has: float) -> RecipeError:
    return RecipeError(
        f"{wish.name} does not fit: a request of {sized.size.model_len} tokens takes {_request_gib(sized):.1f} GiB of "
        f"KV, and an engine on a CPU has {has:g} GiB for it",
        where="--hardware",
        cause="a first recipe for a CPU is for a trial, and has VLLM_CPU_KVCACHE_SPACE as the shipped ones",
        todo="give a smaller --model; or write the recipe by hand, with a larger VLLM_CPU_KVCACHE_SPACE or a shorter "
        "max-model-len: recipes/tiny-cpu.yaml",
    )


def _too_large(wish: InitChoice, largest: Sized) -> RecipeError:
    size, hardware = largest.size, wish.hardware
    weights = 0.0 if size.weights_bytes is None else size.weights_bytes.high / GIB
    return RecipeError(
        f"{wish.name} does not fit: at TP {size.tp} a rank holds {weights:.1f} GiB of weights, a request of "
        f"{size.model_len} tokens takes {_request_gib(largest):.1f} GiB of KV, and {hardware.name} has "
        f"{hardware.device_gib:g} GiB a device",
        where="--hardware",
        cause=f"of {wish.devices} device(s) on a node an instance uses {size.tp}; of each 10 % are kept free, and up "
        f"to {BESIDE_KV_GIB.high:g} GiB are counted for activations. More nodes give more instances, no larger ones",
        todo="give --hardware with more memory, a larger --gpus-per-node, or a quantised --model; an instance over "
        "several nodes is written by hand: recipes/deepseek-r1-wide-ep.yaml",
    )


def _request_gib(sized: Sized) -> float:
    """KV of a request of max-model-len on a rank."""
    return sized.cache.block_bytes * sized.cache.blocks_a_request / GIB
