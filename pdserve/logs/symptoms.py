"""Lines of a process that lives which name what goes wrong: a request that fails, a cache that is not used.

A death is explained by known_causes. These are mostly warnings, which that table rightly ignores. Each pattern
is the text of a log call of vLLM 0.32, LMCache 0.5.6 or the proxy. A template may use the pattern's groups, {role} and
{args}, as there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.logs.known_causes import Rule
from pdserve.roles import ENGINE_ROLES

_ENGINES = frozenset(ENGINE_ROLES)
_PREFILL = frozenset({"prefill"})
_LMCACHE = frozenset({"lmcache"})
_PROXY = frozenset({"proxy"})
_CACHED = _ENGINES | _LMCACHE


@dataclass(frozen=True, kw_only=True)
class Symptom(Rule):
    """One known line of a process that lives."""

    name: str
    """What `pdserve doctor` calls it."""
    setting: str = ""
    """KEY=VALUE of the recipe that removes the cause; KEY*2, KEY+1: more than the run had; empty where no key does."""


def _symptom(
    name: str, pattern: str, cause: str, todo: str, roles: frozenset[str] | None = None, *, setting: str = ""
) -> Symptom:
    return Symptom(re.compile(pattern), cause, todo, roles, name=name, setting=setting)


_TRANSFER_TODO = (
    "look whether the other engine died at that time; if not, pdserve preflight RECIPE checks the addresses and the "
    "RDMA devices, and protocol: tcp on the connector excludes the RDMA network"
)

SYMPTOMS: tuple[Symptom, ...] = (
    # Transfers
    _symptom(
        "transfer-failed",
        r"Sending to (?P<session>\S+) failed \(ret=(?P<code>-?\d+)\)",
        "prefill could not write KV to a decode (Mooncake's code {code}): that decode has ended, is out of reach, or "
        "its memory cannot be written to",
        _TRANSFER_TODO,
        _ENGINES,
    ),
    _symptom(
        "transfer-failed",
        r"pulling kv_caches for .+? failed: (?P<why>.+)",
        "decode did not get the KV that it had asked for: {why}",
        _TRANSFER_TODO,
        _ENGINES,
    ),
    _symptom(
        "transfer-failed",
        r"NIXL transfer failure: (?P<what>\w+)",
        "a NIXL transfer failed ({what})",
        _TRANSFER_TODO,
        _ENGINES,
    ),
    _symptom(
        "bootstrap-unreachable",
        r"Failed to connect to bootstrap server (?P<address>\S+) \((?P<error>\w+)\)",
        "decode cannot reach prefill's bootstrap server {address} ({error}): that prefill died, or a firewall is "
        "between the nodes",
        "look whether that prefill lives (pdserve status); let the nodes reach each other's ports.bootstrap",
        _ENGINES,
    ),
    _symptom(
        "kv-never-fetched",
        r"Request \S+ timed out after (?P<seconds>\d+) seconds without being sent",
        "prefill kept the KV of a request for {seconds} s and no decode asked for it: its client left, decode's queue "
        "was longer, or the request came to prefill past the proxy",
        "send requests to the proxy only; if decode's queue is the reason, add decodes",
        _ENGINES,
        setting="decode.instances+1",
    ),
    _symptom(
        "kv-never-fetched",
        r"Request \S+ expired before sending on P side|Releasing expired KV blocks for request"
        r"|Declining expired remote read",
        "KV was given up before decode had it: decode's queue is longer than prefill keeps the KV of a request",
        "add decodes, or let fewer requests into the pool at once (proxy.admission.decode.max_requests)",
        _ENGINES,
        setting="decode.instances+1",
    ),
    _symptom(
        "prefill-late",
        r"Timeout waiting for P side ready",
        "decode asked for KV that prefill had not computed in time: prefill's queue is too long for its rate",
        "add prefills, or let fewer requests into the pool at once (proxy.admission.prefill.max_requests)",
        _ENGINES,
        setting="prefill.instances+1",
    ),
    _symptom(
        "requests-past-the-proxy",
        r"Got invalid KVTransferParams|Missing transfer_id in kv_transfer_params",
        "a request reached an engine without what the proxy adds: a client or another router talks to the engine "
        "directly, and its KV is computed twice",
        "send all requests to the endpoint that pdserve status shows",
        _ENGINES,
    ),
    _symptom(
        "kv-layouts-differ",
        r"KV group count mismatch: local=(?P<local>\d+), remote=(?P<remote>\d+)",
        "prefill keeps KV in {local} groups and decode in {remote}: their flags differ, so no KV can move",
        "give both roles the same KV flags: move those of prefill.args and decode.args to engine.args",
        _ENGINES,
    ),
    # LMCache
    _symptom(
        "cache-server-silent",
        r"LMCache server is unhealthy|LOOKUP to \S+ timed out after|QUERY_PREFETCH_STATUS to \S+ timed out",
        "LMCache did not answer this engine in time; requests are computed without the cache until it does",
        "look at LMCache's log at that time: it died, was stopped, or its threads are too few for its engines",
        _ENGINES,
    ),
    _symptom(
        "cache-engine-forgotten",
        r"Reaped (?:non-)?GPU instance \S+ silent for (?P<seconds>[\d.]+)s",
        "LMCache has forgotten an engine that was silent for {seconds} s: the engine died, or stood still",
        "look for that engine's death; if it only stood still (a long compilation), wait longer",
        _LMCACHE,
        setting="lmcache.worker_reap_seconds*2",
    ),
    _symptom(
        "cache-engine-forgotten",
        r"No registered (?:non-)?GPU context|Rejecting RETRIEVE for unregistered|No GPU context found for model",
        "an engine uses an LMCache server at which it is not registered: the server was restarted, or had forgotten it",
        "pdserve restart the engine; if LMCache restarts again and again, look for its own cause",
        _LMCACHE,
    ),
    _symptom(
        "cache-too-small",
        r"(?P<count>\d+) L1 reservations failed with out-of-memory",
        "LMCache's L1 had no room for {count} chunks at once: it is too small for what is loaded and stored together",
        "give it more memory, if the host has it",
        _LMCACHE,
        setting="lmcache.l1_size_gb*2",
    ),
    _symptom(
        "cache-lease-expired",
        r"finish read on non-(?:existing|read-locked) key|Some keys not found during retrieve"
        r"|Failed to read prefetched object",
        "KV was gone from L1 before the engine had read it: its read lease is shorter than the engine's queue",
        "raise the lease above the longest wait in the queue",
        _LMCACHE,
        setting="lmcache.l1_read_ttl_seconds*2",
    ),
    _symptom(
        "cache-lease-expired",
        r"write reservation on key .+ expired|whose write reservation expired",
        "a store took longer than its write lease, and its memory was given to others: its KV may be wrong",
        "raise the lease above the slowest store",
        _LMCACHE,
        setting="lmcache.l1_write_ttl_seconds*2",
    ),
    _symptom(
        "cache-store-overwritten",
        r"A store did not finish within (?P<seconds>[\d.]+)s; its KV blocks may be overwritten",
        "LMCache still read blocks after {seconds} s that the engine was about to use again: wrong KV may be stored",
        "clear the cache, find out why LMCache is slow (threads, memory, CPUs), and give it more time",
        _ENGINES,
        setting="lmcache.mq_timeout_seconds*2",
    ),
    _symptom(
        "cache-transfer-failed",
        r"Something went wrong when processing the (?P<what>store|retrieve) request",
        "LMCache reported a failed {what}; the request was computed, and its KV not kept",
        "read LMCache's log at that time; its own warning has the reason",
        _ENGINES,
    ),
    _symptom(
        "cache-slow-copies",
        r"Failed to initialize SHM context .*falling back to pickle",
        "engine and LMCache copy KV through a socket: the shared memory between them could not be made",
        "enlarge /dev/shm beyond lmcache.l1_size_gb (container: --shm-size), or lower lmcache.l1_size_gb",
        _CACHED,
    ),
    _symptom(
        "cache-slow-copies",
        r"affinity_key=\d+ wrapped onto worker slot \d+ \(only (?P<workers>\d+) workers\)",
        "LMCache has {workers} transfer threads for more engine workers: their transfers wait for each other",
        "leave lmcache.max_workers out: pdserve then gives each engine worker a thread",
        _LMCACHE,
    ),
    _symptom(
        "hash-seeds-differ",
        r"Using builtin hash without PYTHONHASHSEED set|Could not load '\S+' from vLLM\. Using builtin hash",
        "LMCache hashes blocks by Python's own hash, which differs between processes: what a server keeps in a second "
        "level is found by no other server, nor by itself after a restart",
        "lmcache.command and engine.command must pass their environment on (PYTHONHASHSEED); leave hash-algorithm out "
        "of lmcache.extra_args",
        _CACHED,
    ),
    _symptom(
        "cache-servers-disagree",
        r"LMCache hit mismatch across servers",
        "the LMCache servers of an instance hold different chunks of a prompt, and the smallest hit counts: a server "
        "has evicted, lost or not stored its part",
        "look for a server that was restarted; give all of them the same size, or use a single server",
        _ENGINES,
        setting="lmcache.per=node",
    ),
    # The proxy
    _symptom(
        "proxy-stands-still",
        r"proxy process \d+ \(\d+\) has not answered for (?P<seconds>\d+) s",
        "a process of the proxy stood still for {seconds} s and was killed: the host had no CPU for it, or it was "
        "stopped",
        "leave CPUs to the proxy: bind engines to CPUs of their own (VLLM_CPU_OMP_THREADS_BIND), or use fewer of it",
        _PROXY,
        setting="proxy.workers=1",
    ),
    _symptom(
        "engine-left-routing",
        r"WARNING (?P<worker>\S+) is (?P<why>.+): not used",
        "the proxy sent {worker} no requests: it was {why}",
        "look at the log of {worker} at that time",
        _PROXY,
    ),
)
