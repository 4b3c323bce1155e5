"""Which connectors go together, within a role and between the two roles."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.connectors.refused import REFUSED
from pdserve.recipe.connectors.registry import (
    MultiSection,
    RawSection,
    child_mappings,
    class_names,
    kinds_of,
    transfer_kinds,
)
from pdserve.recipe.effective import args_of, roles, sections, transfer_of, transfers_of
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import flag_path
from pdserve.recipe.vllm_int import vllm_int

_MULTI = "{kind: multi, of: [{kind: mooncake}, {kind: lmcache-mp}]}"
_MUST_AGREE = {
    "max-model-len": "a prompt that one role takes, the other refuses",
    "kv-cache-dtype": "the bytes that prefill sends mean something else to decode",
}


def transfer(recipe: Recipe) -> Iterator[Problem]:
    """Prefill and decode need exactly one way to each other; an aggregated engine needs none."""
    for name, _, connector in roles(recipe):
        path = (name, "connector")
        transfers = transfers_of(connector)
        if name == "aggregated":
            for leaf in transfers:
                yield Problem(
                    path,
                    f"{leaf.kind} moves KV between prefill and decode, and mode aggregated has neither",
                    "use lmcache-mp, or mode: disaggregated",
                    also=(("mode",),),
                )
        elif not transfers and not isinstance(connector, RawSection):
            kept = " and ".join(dict.fromkeys(leaf.kind for leaf in sections(connector)))
            example = {"": "{kind: mooncake}", "lmcache-mp": _MULTI}.get(kept)
            yield Problem(
                path,
                f"nothing here moves KV between prefill and decode: {name} needs {transfer_kinds()}",
                f"use kind: multi with {transfer_kinds()} and {kept}" if kept else f"use {transfer_kinds()}",
                write=None if example is None else Line(path, example, example=True),
            )
        elif len(kinds := {leaf.kind for leaf in transfers}) > 1:
            yield Problem(
                path,
                f"{' and '.join(sorted(kinds))} together: vLLM lets only one child of a multi answer with transfer "
                "parameters",
                "keep one of them",
            )


def pair(recipe: Recipe) -> Iterator[Problem]:
    """What prefill and decode have to agree on."""
    if recipe.mode == "aggregated":
        return
    (_, prefill_role, prefill), (_, decode_role, decode) = roles(recipe)
    here, there = ("decode", "connector"), ("prefill", "connector")
    sender, receiver = transfer_of(prefill), transfer_of(decode)
    if sender is not None and receiver is not None:
        if sender.kind != receiver.kind:
            yield Problem(
                here,
                f"decode uses {receiver.kind}, prefill uses {sender.kind}",
                "use the same on both",
                also=(there,),
                write=None if isinstance(decode, MultiSection) else Line(here, f"{{kind: {sender.kind}}}"),
            )
        else:
            for key in sender.AGREED:
                if (theirs := getattr(sender, key)) != (ours := getattr(receiver, key)):
                    yield Problem(
                        here,
                        f"decode speaks {ours}, prefill speaks {theirs}",
                        f"use the same {key} on both",
                        also=(there,),
                        write=None if isinstance(decode, MultiSection) else Line((*here, key), str(theirs)),
                    )
    elif isinstance(prefill, RawSection) != isinstance(decode, RawSection):
        yield Problem(here, "one role has a raw connector, the other does not", "use raw on both", also=(there,))
    first, second = args_of(recipe, prefill_role), args_of(recipe, decode_role)
    for flag, why in _MUST_AGREE.items():
        if _value(first.get(flag)) != _value(second.get(flag)):
            yield Problem(
                flag_path(recipe, "decode", flag),
                f"decode has {_shown(second.get(flag))}, prefill has {_shown(first.get(flag))}: {why}",
                f"set engine.args.{flag} for both",
                also=(flag_path(recipe, "prefill", flag),),
            )


def _value(flag: object) -> object:
    """128k is 128000."""
    try:
        return vllm_int(flag)
    except ValueError:
        return flag


def tensor_parallel(recipe: Recipe) -> Iterator[Problem]:
    """Unequal sizes of which neither divides the other. vLLM 0.32 finds out at the first transfer, in an assertion of a
    worker.

    Mooncake, `_get_tp_ratio` in kv_connector/v1/mooncake/mooncake_connector.py, asked by the sender:

        if local_tp_size >= remote_tp_size:
            assert local_tp_size % remote_tp_size == 0, (
                f"Local tensor parallel size {local_tp_size} is not divisible "
                f"by remote tensor parallel size {remote_tp_size}."
        ...
        assert remote_tp_size % local_tp_size == 0, (

    NIXL, `TransferTopology.tp_ratio` in kv_connector/utils.py, asked by decode when it registers prefill's agent
    (kv_connector/v1/nixl/base_worker.py): the same two assertions, with `self.tp_size` for the local one.
    """
    if recipe.mode == "aggregated":
        return
    (_, prefill_role, prefill), (_, decode_role, decode) = roles(recipe)
    kinds = [kind for kind in kinds_of(prefill) if kind.tp_must_divide and kind in kinds_of(decode)]
    smaller, larger = sorted((prefill_role.parallel.tp, decode_role.parallel.tp))
    if not kinds or larger % smaller == 0:
        return
    fits = max(size for size in range(1, smaller) if larger % size == 0)
    yield Problem(
        ("decode", "parallel", "tp"),
        f"{kinds[0].class_name} moves KV between unequal tensor parallel sizes only where one divides the other, and "
        f"{smaller} does not divide {larger}",
        f"write {fits} for {smaller}, or {larger} for both",
        also=(("prefill", "parallel", "tp"),),
    )


def duplicates(recipe: Recipe) -> Iterator[Problem]:
    """The same child twice in a multi."""
    for name, _, connector in roles(recipe):
        if not isinstance(connector, MultiSection):
            continue
        kinds = [leaf.kind for leaf in connector.of]
        for i, kind in enumerate(kinds):
            if kind in kinds[:i]:
                yield Problem(
                    (name, "connector", "of", i),
                    f"{kind} is there twice",
                    "remove one",
                    also=((name, "connector", "of", kinds.index(kind)),),
                )


_TOP_LEVEL_ONLY = {
    "kv_load_failure_policy": (
        "vLLM reads it at the top level only, for all children, and ignores it here",
        "move it to the top level of the mapping, beside the kv_connector of the MultiConnector",
    ),
    "engine_id": (
        "vLLM gives every child the engine_id of the MultiConnector, and refuses a second one",
        "move it to the top level of the mapping, or remove it",
    ),
}
"""Keys of a KVTransferConfig that a child of a MultiConnector must not have -> why not, and what to do."""


def raw_children(recipe: Recipe) -> Iterator[Problem]:
    """Keys that vLLM ignores or refuses in a child of a raw MultiConnector."""
    for name, _, connector in roles(recipe):
        if isinstance(connector, RawSection):
            for path, child in child_mappings(connector.config):
                for key, (what, todo) in _TOP_LEVEL_ONLY.items():
                    if key in child:
                        yield Problem((name, "connector", "config", *path, key), what, todo)


def refused(recipe: Recipe) -> Iterator[Problem]:
    """Raw connectors that lose or corrupt KV."""
    for name, _, connector in roles(recipe):
        if not isinstance(connector, RawSection):
            continue  # a section is refused, or accepted, by the rules of its kind
        for class_name in sorted(REFUSED.keys() & class_names(connector)):
            reason = REFUSED[class_name]
            yield Problem((name, "connector"), f"{class_name}: {reason.why}", reason.todo)


def unverified(recipe: Recipe) -> Iterator[Problem]:
    """Connectors that nothing was checked about, or that rarely work where they are."""
    for name, _, connector in roles(recipe):
        path: Path = (name, "connector")
        if isinstance(connector, RawSection):
            yield Problem(path, "a raw connector is handed to vLLM unchecked: this deployment is unverified")
        for leaf in sections(connector):
            for what, todo in leaf.doubts(recipe.platform):
                yield Problem(path, what, todo)


def _shown(value: object) -> str:
    return "vLLM's default" if value is None else str(value)
