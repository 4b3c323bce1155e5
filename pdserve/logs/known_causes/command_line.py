"""Patches that are refused or missing, flags that a version does not take, ports and addresses."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import ENGINES, LMCACHE, Rule, rule

_PORT_TODO = "find its owner (ss -ltnp, pdserve list), stop it, or move ours: --set ports.KIND=PORT"

COMMAND_LINE: tuple[Rule, ...] = (
    # Patches
    rule(
        r"StartError: (?P<what>patch .+)",
        "{what}",
        "install a vllm in the recipe's `requires` range, or name the patches to apply in `patches`",
    ),
    rule(
        r"(?P<who>\w+) is not contained in the list of registered connectors with Prometheus metrics support",
        "MultiConnector crashed on the metrics of {who} (vllm#43828): the patch that prevents it was not active",
        "use patches: auto, and let VLLM_PLUGINS, if it is set, name pdserve",
    ),
    rule(
        r"Cannot access accelerator device when none is available",
        "Mooncake asked for an accelerator on a host without one: the patch mooncake-cpu-device was not active",
        "use patches: auto with platform: cpu, and let VLLM_PLUGINS, if it is set, name pdserve",
        ENGINES,
    ),
    # The command line
    rule(
        r"error: unrecognized arguments: (?P<flags>.+)",
        "this version does not know the flag {flags}",
        "correct or remove it in {args}; the flags of this version: --help of the command above",
    ),
    rule(
        r"ERROR: unknown command line flag '(?P<flag>[^']+)'",
        "this mooncake_master does not know the flag {flag}",
        "correct or remove it in {args}; its flags: mooncake_master --help",
    ),
    rule(
        r"error: argument (?P<flag>\S+): (?P<why>.+(?:\n +\S.*)?)",
        "the value of {flag} is refused: {why}",
        "correct it in {args}",
    ),
    rule(
        r"error: the following arguments are required: (?P<flags>.+)",
        "the flag {flags} is missing",
        "add it to {args}",
    ),
    # Ports
    rule(
        r"Address already in use \(addr='(?P<address>[^']+)'\)",
        "another process listens on {address} (LMCache's request port)",
        _PORT_TODO.replace("KIND", "lmcache"),
        LMCACHE,
    ),
    rule(
        r"while attempting to bind on address \('(?P<host>[^']*)', (?P<port>\d+)\)(?!.*cannot assign)",
        "another process listens on port {port} of {host}",
        _PORT_TODO,
    ),
    rule(r"[Aa]ddress already in use", "another process listens on one of its ports", _PORT_TODO),
    rule(
        r"[Cc]annot assign requested address",
        "it listens on an address that this host does not have",
        "correct the node's address (or proxy.host); loopback is 127.0.0.1",
    ),
)
