"""Rules of connectors that move KV: within a role and between the two roles; MoRI-IO has its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.recipe.connectors.moriio import ABORT_SECONDS, CLASS, PLATFORM, TIMEOUTS, MoriioSection
from pdserve.recipe.connectors.registry import (
    REFUSED,
    MultiSection,
    RawSection,
    child_mappings,
    class_names,
    kinds_of,
    transfer_kinds,
)
from pdserve.recipe.effective import args_of, first_transfer_of, restart_of, roles, sections, transfers_of
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import VLLM_ROUTER, Recipe, Role
from pdserve.recipe.rules.engines import flag_path
from pdserve.recipe.vllm_int import vllm_int
from pdserve.roles import EngineRole

_MULTI = "{kind: multi, of: [{kind: mooncake}, {kind: lmcache-mp}]}"
_MUST_AGREE = {
    "max-model-len": "a prompt that one role takes, the other refuses",
    "kv-cache-dtype": "the bytes that prefill sends mean something else to decode",
}


def transfer_path(recipe: Recipe) -> Iterator[Problem]:
    """Check the way from prefill to decode. Prefill and decode need exactly one way to each other; an aggregated engine
    needs none."""
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


def role_agreement(recipe: Recipe) -> Iterator[Problem]:
    """Find what prefill and decode have to agree on and do not."""
    if recipe.mode == "aggregated":
        return
    (_, prefill_role, prefill), (_, decode_role, decode) = roles(recipe)
    here, there = ("decode", "connector"), ("prefill", "connector")
    sender, receiver = first_transfer_of(prefill), first_transfer_of(decode)
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
                f"decode has {_value_text(second.get(flag))}, prefill has {_value_text(first.get(flag))}: {why}",
                f"set engine.args.{flag} for both",
                also=(flag_path(recipe, "prefill", flag),),
            )


def _value(flag: object) -> object:
    """Return a flag's value as vLLM reads it: 128k is 128000."""
    try:
        return vllm_int(flag)
    except ValueError:
        return flag


def tensor_parallel(recipe: Recipe) -> Iterator[Problem]:
    """Refuse unequal sizes of which neither divides the other. vLLM 0.32 finds out at the first transfer, in an
    assertion of a worker.

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


def repeated_children(recipe: Recipe) -> Iterator[Problem]:
    """Find a child that stands twice in a multi."""
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
    """Refuse keys that vLLM ignores or refuses in a child of a raw MultiConnector."""
    for name, _, connector in roles(recipe):
        if isinstance(connector, RawSection):
            for path, child in child_mappings(connector.config):
                for key, (what, todo) in _TOP_LEVEL_ONLY.items():
                    if key in child:
                        yield Problem((name, "connector", "config", *path, key), what, todo)


def refused_connectors(recipe: Recipe) -> Iterator[Problem]:
    """Refuse raw connectors that lose or corrupt KV."""
    for name, _, connector in roles(recipe):
        if not isinstance(connector, RawSection):
            continue  # a section is refused, or accepted, by the rules of its kind
        for class_name in sorted(REFUSED.keys() & class_names(connector)):
            reason = REFUSED[class_name]
            yield Problem((name, "connector"), f"{class_name}: {reason.why}", reason.todo)


def unverified_connectors(recipe: Recipe) -> Iterator[Problem]:
    """Warn of connectors that nothing was checked about, or that rarely work where they are."""
    for name, _, connector in roles(recipe):
        path: Path = (name, "connector")
        if isinstance(connector, RawSection):
            yield Problem(path, "a raw connector is handed to vLLM unchecked: this deployment is unverified")
        for leaf in sections(connector):
            for what, todo in leaf.doubts(recipe.platform):
                yield Problem(path, what, todo)


def _value_text(value: object) -> str:
    return "vLLM's default" if value is None else str(value)


# MoRI-IO: what it needs of the rest of a recipe, as vLLM 0.32 has it (kv_connector/v1/moriio).
#
# Acceptance: what no setting closes has to be accepted by name.
#
# Limits: decode computes on after `transfer_timeout`, forgets a read after `recv_abort_timeout`, and prefill frees
# blocks after `defer_timeout`. Each must come after the proxy has ended the request, so that no answer is made of what
# did not arrive. `recv_abort_timeout` must not be the longer one of the first two: then a read that is not waited for
# any more is reported as failed in the same step, and the scheduler takes the step's tokens back.
#
# Layout: a worker listens at `port + dp_rank + tp_rank` (`get_port_offset` with its default `tp_size=1`), and decode
# asks at `port + dp_rank * tp_size + tp_rank` of one host: with data parallelism, stages or context parallelism two
# workers want one port, or decode asks another one than it means. Unequal tensor parallel sizes move only KV that every
# rank has whole (`validate_moriio_heterogeneous_tp_kv_heads`), which a recipe does not know.
#
# Sessions: decode keeps the RDMA sessions of a prefill under its address and port (`_eager_handshaked_engines`,
# `built_write_session`), and never makes them anew: a prefill that was restarted there is not reached again.
@dataclass(frozen=True)
class _Used:
    name: EngineRole
    role: Role
    section: MoriioSection
    path: Path


def _moriio_uses(recipe: Recipe) -> Iterator[_Used]:
    for name, role, connector in roles(recipe):
        if isinstance(connector, MoriioSection):
            yield _Used(name, role, connector, (name, "connector"))
        elif isinstance(connector, MultiSection):
            for index, leaf in enumerate(connector.of):
                if isinstance(leaf, MoriioSection):
                    yield _Used(name, role, leaf, (name, "connector", "of", index))


def moriio_acceptance(recipe: Recipe) -> Iterator[Problem]:
    """Refuse MoRI-IO on another platform, and without the acceptance of what cannot be closed."""
    for used in _moriio_uses(recipe):
        if recipe.platform != PLATFORM:
            yield Problem(
                (*used.path, "kind"),
                f"MoRI-IO moves KV between AMD GPUs only, and the platform is {recipe.platform}",
                f"use kind: nixl or kind: mooncake, or write platform: {PLATFORM} where the GPUs are AMD's",
                also=(("platform",),),
            )
        elif not used.section.accept_unsafe_aborts:
            yield Problem(
                used.path,
                f"{CLASS}: {REFUSED[CLASS].why}",
                "use kind: nixl or kind: mooncake; to have it all the same",
                write=Line((*used.path, "accept_unsafe_aborts"), "true"),
            )


def moriio_limits(recipe: Recipe) -> Iterator[Problem]:
    """Refuse values of the recipe that end a transfer before the proxy has ended its request."""
    request = recipe.proxy.request_timeout_seconds
    least = request + ABORT_SECONDS
    for used in _moriio_uses(recipe):
        found = used.section.seconds(request)
        for key in TIMEOUTS:
            path = (*used.path, f"{key}_seconds")
            if getattr(used.section, f"{key}_seconds") is not None and found[key] < least:
                yield Problem(
                    path,
                    f"{found[key]:g} s end a transfer while its request may go on: the proxy ends one after "
                    f"{request:g} s, and decode hears of it up to {ABORT_SECONDS} s later",
                    "remove it, or lower proxy.request_timeout_seconds",
                    also=(("proxy", "request_timeout_seconds"),),
                    write=Line(path, f"{least:g}"),
                )
        transfer, received = found["transfer_timeout"], found["recv_abort_timeout"]
        if received > transfer:
            yield Problem(
                (*used.path, "recv_abort_timeout_seconds"),
                f"a read is given up after {transfer:g} s and reported as failed after {received:g} s: what decode "
                "computes between them is an answer from KV that did not arrive",
                "remove it",
                also=((*used.path, "transfer_timeout_seconds"),),
            )


def moriio_proxy(recipe: Recipe) -> Iterator[Problem]:
    """Refuse another proxy than pdserve's own, which alone ends requests in the time that the limits are made from."""
    if recipe.proxy.kind == VLLM_ROUTER and next(_moriio_uses(recipe), None) is not None:
        yield Problem(
            ("proxy", "kind"),
            "MoRI-IO needs a proxy that ends each request before vLLM gives up its transfer: of vllm-router that is "
            "not known",
            "write kind: pdserve",
        )


def moriio_layout(recipe: Recipe) -> Iterator[Problem]:
    """Check the layout of MoRI-IO: tensor parallelism within one node, of the same size on both sides, is all that its
    ports allow."""
    used = list(_moriio_uses(recipe))
    for one in used:
        parallel = one.role.parallel
        for key, value, why in (
            ("dp", parallel.dp, "workers of different data-parallel ranks want the same port"),
            ("pp", parallel.pp, "workers of different stages want the same port"),
            ("pcp", parallel.pcp, "context-parallel workers want the same port"),
            ("nodes", parallel.nodes, "decode asks one host for all workers of an instance"),
        ):
            if value > 1:
                yield Problem(
                    (one.name, "parallel", key),
                    f"{one.name} has {key} {value}, and MoRI-IO of vLLM 0.32 needs 1: {why}",
                    f"write {key}: 1, with more instances or a larger tp, or use kind: nixl on both roles",
                    also=(one.path,),
                )
    sizes = {one.name: one.role.parallel.tp for one in used}
    if len(set(sizes.values())) > 1:
        yield Problem(
            ("decode", "parallel", "tp"),
            f"prefill has tp {sizes['prefill']} and decode {sizes['decode']}: between unequal sizes MoRI-IO moves only "
            "KV that every rank has whole, and else fails at the first transfer",
            f"write {max(sizes.values())} for both, or use kind: nixl",
            also=(("prefill", "parallel", "tp"),),
        )


def moriio_decode_caches(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a cache beside MoRI-IO on decode: its reads are synchronous and those of caches are not, and such a pair
    ran nowhere."""
    for used in _moriio_uses(recipe):
        if used.name == "decode" and len(used.path) > len(("decode", "connector")):
            yield Problem(
                ("decode", "connector"),
                "MoRI-IO reads within a step, and no cache beside it on decode was checked",
                "write kind: moriio alone on decode; a cache belongs to prefill",
            )


def moriio_restarts(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a prefill that comes back beside MoRI-IO."""
    for used in _moriio_uses(recipe):
        if used.name == "prefill" and restart_of(used.name, used.role, used.section).policy != "never":
            path = ("prefill", "restart", "policy")
            yield Problem(
                path,
                "decode keeps the MoRI-IO sessions of a prefill that has died, and fails every read from the one that "
                "takes its place",
                "after a death of prefill take the deployment down and up again",
                also=(used.path,),
                write=Line(path, "never"),
            )
