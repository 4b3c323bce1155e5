"""Layouts of prefill and decode between which a connector does not move KV, as vLLM 0.32 has it: pipeline parallelism
and block sizes. Sizes of tensor parallelism are in connectors.py.

NIXL, where decode pulls (kv_connector/v1/nixl/base_worker.py): a kv_consumer raises NotImplementedError for
pipeline_parallel_size > 1. A decode without stages registers as many regions as the model has layers, and asserts
"Number of KV layers must match between prefill and decode" of each stage of a prefill. Mooncake asks every stage for
its layers.

Blocks: Mooncake pairs the block ids of both sides one to one (mooncake_connector.py): with smaller blocks decode has
more of them, and each transfer fails ("P num blocks less than D"); with larger ones it takes the last of prefill's
for the whole prompt, and nothing notices. NIXL divides decode's blocks by prefill's
(`TransferTopology.block_size_ratio`, and "Different local/remote block sizes are not supported when P TP > D TP"), but
compares those of the attention backend, which may be smaller than the flag: a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.connectors.mooncake import MooncakeSection
from pdserve.recipe.connectors.nixl import NixlSection
from pdserve.recipe.effective import args_of, roles, transfer_of
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import flag_path

_FLAG = "block-size"


def pipeline_parallel(recipe: Recipe) -> Iterator[Problem]:
    """Stages on a side of NIXL."""
    for name, role, connector in roles(recipe):
        pp = role.parallel.pp
        if pp > 1 and isinstance(transfer_of(connector), NixlSection):
            tp = role.parallel.tp * pp
            yield Problem(
                (name, "parallel", "pp"),
                f"{name} has {pp} pipeline stages, and NIXL moves KV between engines without stages only: "
                + ("vLLM refuses them at its start" if name == "decode" else "each transfer would fail"),
                f"write pp: 1 (with tp: {tp}, if {tp} divides the model's heads), or use mooncake on both roles",
                also=((name, "connector"),),
            )


def block_sizes(recipe: Recipe) -> Iterator[Problem]:
    """Mooncake with unequal blocks."""
    if recipe.mode == "aggregated":
        return
    (_, prefill_role, prefill), (_, decode_role, decode) = roles(recipe)
    if not isinstance(transfer_of(prefill), MooncakeSection) or not isinstance(transfer_of(decode), MooncakeSection):
        return
    ours, theirs = args_of(recipe, decode_role).get(_FLAG), args_of(recipe, prefill_role).get(_FLAG)
    if ours == theirs:
        return
    yield Problem(
        flag_path(recipe, "decode", _FLAG),
        f"decode has blocks of {_shown(ours)}, prefill of {_shown(theirs)}: Mooncake pairs them one to one, and each "
        "transfer fails, or decode reads the KV of other tokens",
        f"set engine.args.{_FLAG} for both",
        also=(flag_path(recipe, "prefill", _FLAG),),
    )


def uneven_blocks(recipe: Recipe) -> Iterator[Problem]:
    """NIXL with blocks that vLLM may not be able to divide."""
    if recipe.mode == "aggregated":
        return
    (_, prefill_role, prefill), (_, decode_role, decode) = roles(recipe)
    if not isinstance(transfer_of(prefill), NixlSection) or not isinstance(transfer_of(decode), NixlSection):
        return
    ours, theirs = args_of(recipe, decode_role).get(_FLAG), args_of(recipe, prefill_role).get(_FLAG)
    if not isinstance(ours, int) or not isinstance(theirs, int) or theirs < 1 or ours == theirs:
        return
    if ours % theirs:
        why = "unless its attention backend has smaller ones, decode refuses blocks that are no multiple of prefill's"
    elif prefill_role.parallel.tp > decode_role.parallel.tp:
        why = "where prefill has more tensor parallel ranks, only KV that every rank has whole (MLA) is moved between "
        why += "unequal blocks"
    else:
        return
    yield Problem(
        flag_path(recipe, "decode", _FLAG),
        f"decode has blocks of {ours} tokens, prefill of {theirs}: {why}",
        f"set engine.args.{_FLAG} for both",
        also=(flag_path(recipe, "prefill", _FLAG),),
    )


def _shown(value: object) -> str:
    return "vLLM's default size" if value is None else f"{show.value(value)} tokens"
