"""A first recipe, as data with the reason of each value, from the words of the user and what is known of the model.

An instance stays on one node. Sizes are powers of two, as the heads and experts of models are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from pdserve.errors import RecipeError
from pdserve.models.config_json import UnknownModelError
from pdserve.models.kv_cache import NULL_BLOCK, good_chunk, table_groups
from pdserve.models.layers import text_config
from pdserve.models.weights import Tensor
from pdserve.recipe.base import FlagValue, as_name
from pdserve.recipe.load.environment import escape
from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Eviction
from pdserve.sizing import BESIDE_KV_GIB, GIB, SizedRole, SizingOptions, size_role, stored_token_bytes
from pdserve.starter.goal import Goal


@dataclass(frozen=True)
class Hardware:
    """Describes one kind of node."""

    name: str
    platform: Literal["cuda", "rocm", "cpu"]
    device_gib: float
    """Memory of a device, GiB, as PyTorch has it, in whole ones that are surely there; 0 without devices."""
    devices: int
    """The devices of a usual node; 0 without devices."""
    transfer: Mapping[str, FlagValue]
    """The connector that moves KV from prefill to decode."""
    transfer_reason: str
    args: Mapping[str, tuple[FlagValue, str]] = field(default_factory=dict)
    """Flag -> value, reason."""
    env: Mapping[str, tuple[FlagValue, str]] = field(default_factory=dict)


_SHARE: Mapping[str, tuple[FlagValue, str]] = {
    "gpu-memory-utilization": (0.9, "as in the shipped recipes; the rest is for what vLLM does not count")
}
_READY: tuple[FlagValue, str] = (3600, "vLLM gives its own engine 600 s to load; keep it at timeouts.engine_seconds")


def _cuda(name: str, device_gib: float) -> Hardware:
    return Hardware(
        name,
        "cuda",
        device_gib,
        8,
        {"kind": "nixl"},
        "as in the shipped recipes for H200; moves KV of several groups too",
        _SHARE,
        {"VLLM_ENGINE_READY_TIMEOUT_S": _READY},
    )


def _rocm(name: str, device_gib: float) -> Hardware:
    return Hardware(
        name,
        "rocm",
        device_gib,
        8,
        {"kind": "mooncake", "protocol": "tcp"},
        "needs no RDMA device, but a Mooncake built for ROCm; try rdma where there are adapters",
        _SHARE,
        {"VLLM_ROCM_USE_AITER": (1, "AMD's kernels"), "VLLM_ENGINE_READY_TIMEOUT_S": _READY},
    )


_ALL = (
    # 288 GiB: rocm.docs.amd.com/en/latest/reference/gpu-specs.html. PyTorch: 287.98.
    _rocm("mi355x", 287),
    # 192 GiB: the same page. PyTorch: 191.69 to 191.98.
    _rocm("mi300x", 191),
    # SXM, 80 GB: www.nvidia.com/en-us/data-center/h100/. PyTorch: 79.14 to 79.25. (The NVL has 94 GB.)
    _cuda("h100", 79),
    # 141 GB: www.nvidia.com/en-us/data-center/h200/. PyTorch: 139.80.
    _cuda("h200", 139),
    # 180 GB: 1,440 GB of 8, docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html. PyTorch: 178.35.
    _cuda("b200", 178),
    Hardware(
        "cpu",
        "cpu",
        0,
        0,
        {"kind": "mooncake", "protocol": "tcp"},
        "a machine without devices has TCP",
        {
            "enforce-eager": (True, "compiling takes longer than a trial"),
            "max-num-seqs": (16, "as in the shipped recipes for a CPU"),
        },
        {
            "VLLM_CPU_KVCACHE_SPACE": (1, "GiB of KV, whole numbers only; vLLM's own choice is sized for a big host"),
            "VLLM_CPU_OMP_THREADS_BIND": ("nobind", "by default every engine binds to the same cores"),
            "OMP_NUM_THREADS": (1, "two engines share this machine"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": (0, "an engine with one rank needs no process for it: a faster start"),
        },
    ),
)
HARDWARE: Mapping[str, Hardware] = {hardware.name: hardware for hardware in _ALL}
"""Each device's memory has its vendor's figure beside it, and what PyTorch calls "total capacity" in public logs of it
(vLLM takes its share of that), which is 0.7 to 1.8 GiB less on NVIDIA. None was measured here: a recipe is right only
after `pdserve preflight` on the nodes."""


LONGEST: Mapping[Goal, int] = {Goal.THROUGHPUT: 32768, Goal.LATENCY: 32768, Goal.AGENTS: 131072}
"""Tokens of a request that a first recipe serves, where the model can do more."""

_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True)
class InitChoice:
    """Holds what was chosen for a first recipe, and what is known of the model. `config`, `tensors`: None where they
    are not on this machine."""

    name: str
    """The end of the model's path or id."""
    path: str | None
    """An absolute folder; None: `id` is of the hub."""
    id: str | None
    hardware: Hardware
    nodes: int
    devices: int
    """The devices of each node; 0 on a CPU."""
    goal: Goal
    longest: int
    """max-model-len is no more."""
    config: Mapping[str, Any] | None
    tensors: tuple[Tensor, ...] | None

    @property
    def model_length(self) -> int | None:
        """Return the longest request that the model can serve; None: not known."""
        if self.config is None:
            return None
        length = text_config(self.config).get(_POSITIONS) or self.config.get(_POSITIONS)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def length(self) -> int | None:
        """Return max-model-len; None: left to vLLM. A model whose config.json has none gets the longest: without a
        length nothing can be planned."""
        if self.config is None:
            return None
        return self.longest if self.model_length is None else min(self.model_length, self.longest)

    @property
    def length_reason(self) -> str:
        """Return the reason of max-model-len."""
        limit = f"{LONGEST[self.goal]} for --goal {self.goal}"
        fits = "" if self.longest == LONGEST[self.goal] else f", halved to {self.longest} until it fits"
        if self.model_length is None:
            return f"NOT CHECKED: config.json has no {_POSITIONS}; {limit}{fits}"
        return f"the model's {self.model_length}, at most {limit}{fits}"

    @property
    def heads(self) -> int | None:
        """Return the attention heads, which tensor parallelism deals out; None: not known."""
        if self.config is None:
            return None
        heads = text_config(self.config).get("num_attention_heads")
        return heads if isinstance(heads, int) and heads > 0 else None


WANTED_REQUESTS = 4
"""Requests of max-model-len that an instance should hold at once, where a larger one can."""

Size = Callable[["Layout"], SizedRole | None]
"""The planner on a layout; None: it does not know the model."""


@dataclass(frozen=True)
class Layout:
    """Holds the instances of a recipe. `decode` is 0 where one engine does both."""

    tp: int
    prefill: int
    decode: int
    reason: str
    """The reason of `tp`."""
    sized: SizedRole | None = None

    @property
    def aggregated(self) -> bool:
        """Return True if there is room for one instance only."""
        return self.decode == 0


def choose_layout(wish: InitChoice, size: Size) -> Layout:
    """Choose how many devices an instance has, and how many instances there are. Raises RecipeError where no instance
    on one node can hold the weights and a request."""
    if wish.hardware.platform == "cpu":
        return _on_cpu(wish, size)
    splits = [_split(wish, tp) for tp in _tp_sizes(wish)]
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


def describe_numbers(wish: InitChoice, sized: SizedRole) -> str:
    """Describe the planner's numbers of one rank and one instance."""
    size = sized.size
    weights, requests = size.weights_bytes, size.requests
    held = "weights not known" if weights is None else f"{weights.high / GIB:.3g} of {wish.hardware.device_gib:g} GiB"
    if requests is None:
        return f"weights of a rank {held}"
    return f"weights of a rank {held}; {requests.low:.1f} to {requests.high:.1f} requests of {size.model_len} tokens"


def _on_cpu(wish: InitChoice, size: Size) -> Layout:
    """Choose the layout on a CPU. The weights are in host memory, which preflight looks at; the memory for KV is stated
    in the recipe."""
    plain = Layout(1, 1, 1, "a CPU engine is one rank")
    sized = size(plain)
    if sized is not None and sized.size.kv_bytes is not None and not _holds_one(sized):
        raise _too_long(wish, sized, sized.size.kv_bytes.high / GIB)
    return replace(plain, sized=sized)


def _tp_sizes(wish: InitChoice) -> Iterator[int]:
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


def _requests(sized: SizedRole) -> float:
    """Return the requests at the planner's cautious end."""
    return 0 if sized.size.requests is None else sized.size.requests.low


def _holds_one(sized: SizedRole) -> bool:
    """Tell whether an instance holds a request of max-model-len, beside the block that vLLM keeps for itself; at the
    planner's cautious end."""
    blocks = sized.size.blocks
    return blocks is not None and sized.cache.blocks_a_request <= int(blocks.low) - NULL_BLOCK


def _too_long(wish: InitChoice, sized: SizedRole, has: float) -> RecipeError:
    return RecipeError(
        f"{wish.name} does not fit: a request of {sized.size.model_len} tokens takes {_request_gib(sized):.1f} GiB of "
        f"KV, and an engine on a CPU has {has:g} GiB for it",
        where="--hardware",
        cause="a first recipe for a CPU is for a trial, and has VLLM_CPU_KVCACHE_SPACE as the shipped ones",
        todo="give a smaller --model; or write the recipe by hand, with a larger VLLM_CPU_KVCACHE_SPACE or a shorter "
        "max-model-len: recipes/tiny-cpu.yaml",
    )


def _too_large(wish: InitChoice, largest: SizedRole) -> RecipeError:
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


def _request_gib(sized: SizedRole) -> float:
    """Return the KV of a request of max-model-len on a rank."""
    return sized.cache.block_bytes * sized.cache.blocks_a_request / GIB


_CHUNK = 256
_L1_GIB = 64
_MOST_L1_GIB = 900
"""907 GB registered with MI355X, 1360 GB did not (recipes/base/kimi-k2.5-mxfp4-mi355x.yaml)."""
_SHORTEST = 8192
"""Tokens: below it, a model that leaves too little KV is refused."""


class Starter:
    """A recipe's document, and a comment for values of it."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = {}
        self.reasons: dict[Path, str] = {}

    def put(self, *path: str | int, value: Any, reason: str | None = None) -> None:
        """Set a value. A path leads through mappings only."""
        into = self.document
        for part, _ in pairwise(path):
            into = into.setdefault(str(part), {})
        into[str(path[-1])] = escape(value)
        if reason is not None:
            self.reasons[path] = reason


def draft(wish: InitChoice) -> Starter:
    """Draft a first recipe, with requests as long as the hardware can hold. Raises RecipeError where it cannot hold the
    model."""
    while True:
        try:
            return _write_starter(wish, choose_layout(wish, partial(_size_layout, wish)))
        except RecipeError:
            if min(wish.longest, wish.length or 0) <= _SHORTEST:
                raise
            wish = replace(wish, longest=wish.longest // 2)


def _size_layout(wish: InitChoice, layout: Layout) -> SizedRole | None:
    if wish.config is None or wish.length is None:
        return None
    recipe = Recipe.model_validate(_write_starter(wish, layout).document)
    name, role = recipe.roles()[0]
    given = SizingOptions(device_gib=wish.hardware.device_gib or None)
    try:
        return size_role(recipe, name, role, wish.config, wish.tensors, given)
    except UnknownModelError:
        return None


def _write_starter(wish: InitChoice, layout: Layout) -> Starter:
    made, hardware = Starter(), wish.hardware
    name = as_name(f"{wish.name}-{hardware.name}") or "first"
    made.put("schema", value=1)
    made.put("name", value=name)
    made.put("description", value=f"{wish.name} on {wish.nodes} node(s) of {hardware.name}, for {wish.goal}.")
    made.put("status", value="untested", reason="nothing was started yet")
    made.put("platform", value=hardware.platform, reason=f"--hardware {hardware.name}")
    if wish.devices:
        made.put("devices_per_node", value=wish.devices, reason="--gpus-per-node, or the usual node")
    if layout.aggregated:
        made.put("mode", value="aggregated", reason="one instance fills the node: more nodes give prefill and decode")
    for package, versions in _requires(wish, layout).items():
        made.put("requires", package, value=versions, reason="as in the shipped recipes")
    _model(wish, made)
    if wish.length is not None:
        made.put("engine", "args", "max-model-len", value=wish.length, reason=wish.length_reason)
    for flag, (value, reason) in hardware.args.items():
        made.put("engine", "args", flag, value=value, reason=reason)
    for variable, (value, reason) in hardware.env.items():
        made.put("engine", "env", variable, value=value, reason=reason)
    _roles(wish, layout, made)
    if wish.goal is Goal.AGENTS:
        _agents(wish, layout, made)
    if wish.nodes > 1:
        made.put("slurm", "nodes", value=wish.nodes, reason="--nodes; used in a Slurm job only")
    if wish.devices:
        made.put("timeouts", "engine_seconds", value=3600, reason="large weights take half an hour from a file system")
        made.put("timeouts", "canary_seconds", value=600, reason="the first request compiles")
    return made


def _requires(wish: InitChoice, layout: Layout) -> dict[str, str]:
    needed = {"vllm": ">=0.26,<0.34"}
    if wish.goal is Goal.AGENTS:
        needed["lmcache"] = ">=0.5.6,<0.6"
    if not layout.aggregated and wish.hardware.transfer["kind"] == "mooncake":
        needed["mooncake"] = ">=0.3.13"
    return needed


def _model(wish: InitChoice, made: Starter) -> None:
    if wish.path is not None:
        known = "" if wish.config is not None else ", NOT CHECKED: no config.json there that can be read"
        made.put("model", "path", value=wish.path, reason=f"on every node{known}")
    else:
        known = "read from the hub's cache" if wish.config is not None else "NOT CHECKED: not in the hub's cache here"
        made.put("model", "id", value=wish.id, reason=known)
    made.put("model", "served_name", value=wish.name.lower(), reason="what clients write as the model")


def _roles(wish: InitChoice, layout: Layout, made: Starter) -> None:
    counts = (
        {"aggregated": layout.prefill} if layout.aggregated else {"prefill": layout.prefill, "decode": layout.decode}
    )
    for number, (role, instances) in enumerate(counts.items()):
        ratio = "the ratio is a start: measure, then `pdserve plan --prefill-rate --decode-rate`"
        made.put(role, "instances", value=instances, reason=None if number or layout.aggregated else ratio)
        made.put(role, "parallel", "tp", value=layout.tp, reason=None if number else layout.reason)
        if layout.sized is not None and layout.sized.size.weights_bytes is not None and wish.devices and not number:
            made.reasons[(role, "parallel")] = describe_numbers(wish, layout.sized)
        transfer = [] if layout.aggregated else [dict(wish.hardware.transfer)]
        keeps = wish.goal is Goal.AGENTS and role != "decode"
        parts = [*transfer, *([{"kind": "lmcache-mp"}] if keeps else [])]
        if len(parts) == 1:
            reason = None if number or not transfer else wish.hardware.transfer_reason
            made.put(role, "connector", value=parts[0], reason=reason)
        elif parts:
            made.put(role, "connector", value={"kind": "multi", "of": parts}, reason=wish.hardware.transfer_reason)


def _agents(wish: InitChoice, layout: Layout, made: Starter) -> None:
    """Write what suits long prompts that begin as earlier ones did: old prefixes stay in host memory."""
    role = "aggregated" if layout.aggregated else "prefill"
    made.put("lmcache", "on", value=[role], reason="--goal agents: old prefixes are read back, not computed again")
    l1, why = _l1(wish, layout)
    made.put("lmcache", "l1_size_gb", value=l1, reason=why)
    chunk = _CHUNK if layout.sized is None else good_chunk(table_groups(layout.sized.cache), _CHUNK)
    made.put("lmcache", "chunk_size", value=chunk, reason="tokens; whole blocks of the engine")
    if wish.hardware.platform == "cpu":
        made.put("lmcache", "transfer_mode", value="auto", reason="an engine on a CPU moves the bytes itself")
    elif wish.hardware.platform == "rocm":
        pinned = math.ceil((l1 + wish.devices * wish.hardware.device_gib) / 60) * 60
        made.put("lmcache", "mq_timeout_seconds", value=pinned, reason="a second for each GiB of L1 and devices")
    if not layout.aggregated and layout.prefill > 1:
        made.put("proxy", "routing", "prefill", "kind", value="prefix_aware", reason="a prompt goes where its start is")


def _l1(wish: InitChoice, layout: Layout) -> tuple[int, str]:
    tokens = None if layout.sized is None else layout.sized.size.tokens
    if layout.sized is None or tokens is None:
        return _L1_GIB, "GiB a node, NOT CHECKED against the KV of an engine: pdserve plan says what it holds"
    held = tokens.high * stored_token_bytes(layout.sized.cache, layout.tp)
    # Prefills are placed first, and fill a node before the next. A node without devices has one.
    engines = min(layout.prefill, max(wish.devices // layout.tp, 1))
    gib = math.ceil(held * engines / Eviction().watermark / GIB)
    if gib > _MOST_L1_GIB:
        return _MOST_L1_GIB, f"GiB a node: the largest seen to register; the KV of {engines} engine(s) would fill {gib}"
    return gib, f"GiB a node: what {engines} engine(s) keep themselves; host memory is not checked before preflight"
