"""Patch nixl-push: NIXL's push mode with an end to every registration, and no WRITE outside of a lease.

vLLM 0.32 leaves four gaps. A registration that prefill never answers makes decode's request wait for ever. An abort of
that request tells nobody, and its blocks are lost. Prefill begins a WRITE after its lease, from blocks that other
prompts may have. It frees blocks from which a WRITE still reads when their lease ends.

Here decode withdraws a registration, on an abort and after `push_registration_timeout`, and gives its blocks back by
the rules of push_decode.py; prefill begins and ends WRITEs by those of push_prefill.py, and says when there will be
none. The words are in push_messages.py. Both need one WRITE to have one reader: prefill and decode with the same tensor
parallel size, and no pipeline (recipe/rules/connectors.py).

With both legs at once decode cannot know prefill's id of a request, so its heartbeats named nobody. Here they have its
own, and prefill finds its request by the part that both ids share.
"""

from __future__ import annotations

from pdserve.patches.nixl import push_decode, push_prefill, push_scheduler, push_worker
from pdserve.patches.nixl.push_prefill import NAME
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap


def apply() -> None:
    """Wraps four methods of NixlPushConnector's scheduler half, and ten of its worker."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

    for attribute, around in push_scheduler.METHODS.items():
        wrap(NixlPushConnectorScheduler, attribute, patch=NAME, around=around)
    for attribute, around in push_worker.METHODS.items():
        wrap(NixlPushConnectorWorker, attribute, patch=NAME, around=around)


_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."
_PUSH_SCHEDULER = f"{_NIXL}push_scheduler.NixlPushConnectorScheduler."
_PUSH_WORKER = f"{_NIXL}push_worker.NixlPushConnectorWorker."
_BASE_WORKER = f"{_NIXL}base_worker.NixlBaseConnectorWorker."

PATCH = Patch(
    name=NAME,
    behaviour="abandoned transfers",
    summary=(
        "NIXL's push mode has decode wait for ever for a WRITE that never comes, forgets aborts, and writes from "
        "blocks whose lease has ended. Decode withdraws registrations and frees their blocks once prefill says that "
        "it writes nothing, or is gone; no WRITE begins after its lease, and none outlives it."
    ),
    issue="https://github.com/vllm-project/vllm/issues/46283",
    vllm=">=0.32",
    targets=(
        PatchTarget(f"{_NIXL}base_scheduler.NixlBaseConnectorScheduler.on_new_request", body=True, only=">=0.32"),
        *(
            PatchTarget(f"{_PUSH_SCHEDULER}{name}", body=True, only=">=0.32")
            for name in ("update_state_after_alloc", "request_finished", "build_connector_meta")
        ),
        *(
            PatchTarget(f"{_PUSH_WORKER}{name}", body=True, only=">=0.32")
            for name in (
                "__init__",
                "start_load_kv",
                "_push_writer_loop",
                "_handle_push_reg_notif",
                "_send_registration_to_p",
                "_do_send_reg_notif",
                "_do_start_push_kv",
                "_xfer_blocks_for_req",
                "_xfer_blocks",
                "_get_new_notifs",
                "get_transfer_results",
                "shutdown",
            )
        ),
        *(
            PatchTarget(f"{_BASE_WORKER}{name}", body=True, only=">=0.32")
            for name in (
                "_ensure_handshake",
                "get_transfer_results",
                "_reap_expired_send_leases",
                "_handle_heartbeat",
                "_pop_done_transfers",
            )
        ),
    ),
    runs_in=("engine-core", "worker"),
    connectors=frozenset({"NixlPushConnector"}),
    required=True,
    instead="use connector kind nixl, where decode pulls",
    effects={
        push_scheduler.EXPIRED: "requests of decode whose KV had not come after push_registration_timeout",
        push_scheduler.WITHDRAWN: "requests of decode that were aborted while they waited for their KV",
        push_decode.UNSENT: "registrations that were withdrawn before prefill had them",
        push_decode.CLEARED: "registrations that ended because prefill writes nothing for them",
        push_decode.GONE: "registrations that ended because prefill's engine is gone",
        push_prefill.REFUSED: "WRITEs that did not begin: their lease had ended, or decode had withdrawn",
        push_prefill.KEPT: "times that blocks outlived their lease because a WRITE still read them",
        push_prefill.ANSWERED: "answers to decode that nothing is written for a request",
    },
    remove_when="vLLM's push mode ends registrations, and keeps blocks while it writes from them",
    apply=apply,
)
