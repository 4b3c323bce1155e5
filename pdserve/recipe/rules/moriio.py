"""MoRI-IO (kind: moriio): what it needs of the rest of a recipe, as vLLM 0.32 has it (kv_connector/v1/moriio).

Acceptance: what no setting closes has to be accepted by name.

Limits: decode computes on after `transfer_timeout`, forgets a read after `recv_abort_timeout`, and prefill frees blocks
after `defer_timeout`. Each must come after the proxy has ended the request, so that no answer is made of what did not
arrive. `recv_abort_timeout` must not be the longer one of the first two: then a read that is not waited for any more is
reported as failed in the same step, and the scheduler takes the step's tokens back.

Layout: a worker listens at `port + dp_rank + tp_rank` (`get_port_offset` with its default `tp_size=1`), and decode asks
at `port + dp_rank * tp_size + tp_rank` of one host: with data parallelism, stages or context parallelism two workers
want one port, or decode asks another one than it means. Unequal tensor parallel sizes move only KV that every rank has
whole (`validate_moriio_heterogeneous_tp_kv_heads`), which a recipe does not know.

Sessions: decode keeps the RDMA sessions of a prefill under its address and port (`_eager_handshaked_engines`,
`built_write_session`), and never makes them anew: a prefill that was restarted there is not reached again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.recipe.connectors.moriio import ABORT_SECONDS, CLASS, PLATFORM, TIMEOUTS, MoriioSection
from pdserve.recipe.connectors.refused import REFUSED
from pdserve.recipe.connectors.registry import MultiSection
from pdserve.recipe.effective import restart_of, roles
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.sections.vllm_router import KIND
from pdserve.roles import EngineRole


@dataclass(frozen=True)
class _Used:
    name: EngineRole
    role: Role
    section: MoriioSection
    path: Path


def _used(recipe: Recipe) -> Iterator[_Used]:
    for name, role, connector in roles(recipe):
        if isinstance(connector, MoriioSection):
            yield _Used(name, role, connector, (name, "connector"))
        elif isinstance(connector, MultiSection):
            for index, leaf in enumerate(connector.of):
                if isinstance(leaf, MoriioSection):
                    yield _Used(name, role, leaf, (name, "connector", "of", index))


def accepted(recipe: Recipe) -> Iterator[Problem]:
    """Its platform, and the acceptance of what cannot be closed."""
    for used in _used(recipe):
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


def limits(recipe: Recipe) -> Iterator[Problem]:
    """Values of the recipe that end a transfer before the proxy has ended its request."""
    request = recipe.proxy.request_timeout_seconds
    least = request + ABORT_SECONDS
    for used in _used(recipe):
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


def proxy(recipe: Recipe) -> Iterator[Problem]:
    """Only pdserve's own proxy ends requests in the time that the limits are made from."""
    if recipe.proxy.kind == KIND and next(_used(recipe), None) is not None:
        yield Problem(
            ("proxy", "kind"),
            "MoRI-IO needs a proxy that ends each request before vLLM gives up its transfer: of vllm-router that is "
            "not known",
            "write kind: pdserve",
        )


def layout(recipe: Recipe) -> Iterator[Problem]:
    """Tensor parallelism within one node, of the same size on both sides, is all that its ports allow."""
    used = list(_used(recipe))
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


def alone_on_decode(recipe: Recipe) -> Iterator[Problem]:
    """Its reads are synchronous and those of caches are not: such a pair on decode ran nowhere."""
    for used in _used(recipe):
        if used.name == "decode" and len(used.path) > len(("decode", "connector")):
            yield Problem(
                ("decode", "connector"),
                "MoRI-IO reads within a step, and no cache beside it on decode was checked",
                "write kind: moriio alone on decode; a cache belongs to prefill",
            )


def restarts(recipe: Recipe) -> Iterator[Problem]:
    """A prefill that comes back."""
    for used in _used(recipe):
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
