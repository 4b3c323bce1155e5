"""Dynamo's flags about answers in a recipe of srt-slurm, parsers and the default of thinking, become vLLM's own.

Dynamo's workers and its frontend have flags of their own beside vLLM's (ai-dynamo 1.5.0: dynamo/common/configuration,
dynamo/frontend). A recipe starts vLLM's API server, which does the same by other flags.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.importing.launch import EngineLaunch, Launch, SourcedValue
from pdserve.importing.yaml_tree import TrackedTree
from pdserve.recipe.load import show

_PARSERS = {"dyn-tool-call-parser": "tool-call-parser", "dyn-reasoning-parser": "reasoning-parser"}
"""Flags of Dynamo's worker -> vLLM's own."""
_SAME_PARSERS = frozenset({"minimax_m3", "kimi_k2", "kimi_k3", "deepseek_v4", "hermes", "glm47"})
"""Names of parsers that mean the same to both."""
_FRONTEND = ("tool-call-parser", "reasoning-parser", "enable-auto-tool-choice")
"""Flags that Dynamo's frontend hands to vLLM's code where `dyn-chat-processor` is vllm."""
_THINKING = "dyn-default-thinking-mode"
_KWARGS = "default-chat-template-kwargs"
_TEMPLATE = "custom-jinja-template"
_ROUTING = ("router-", "active-decode-blocks-threshold", "active-prefill-tokens-threshold")
"""How flags begin by which a worker tells the frontend how to route to it (router_args.py)."""
_RUNTIME = frozenset(
    {"namespace", "endpoint", "kv-state-endpoint", "discovery-backend", "request-plane", "event-plane", "fpm-trace"}
    | {"dump-config-to", "disaggregation-mode", "health-check-payload", "use-vllm-tokenizer"}
)
_GONE = {"disable-log-requests": "vLLM 0.32 has no such flag, and logs no requests unless it is asked to"}


def is_dynamos_flag(name: str) -> bool:
    """Return whether a worker's flag is Dynamo's, and not vLLM's."""
    return name in _GONE or name in _RUNTIME or name == _TEMPLATE or name.startswith(("dyn-", *_ROUTING))


def read(tracked: TrackedTree, launch: Launch) -> None:
    """Turn what Dynamo is told into flags of all roles: prefill and decode render the same prompt."""
    thinking = [at for engines in launch.roles.values() if (at := engines.args.pop(_THINKING, None)) is not None]
    for engines in launch.roles.values():
        _worker(engines, launch)
    _frontend(tracked, launch)
    _think(thinking, launch)


def _worker(engines: EngineLaunch, launch: Launch) -> None:
    args = engines.args
    for name in list(args):
        if name in _GONE:
            launch.note(args.pop(name), _GONE[name], "replaced")
        elif name.startswith(_ROUTING):
            why = "how Dynamo routes to this worker; the proxy decides that here (proxy.routing)"
            launch.note(args.pop(name), why, "replaced")
        elif name in _RUNTIME:
            launch.note(args.pop(name), "a flag of Dynamo's worker, which a recipe does not start", "unused")
        elif name == _TEMPLATE:
            at = args.pop(name)
            args.setdefault("chat-template", at)
            launch.note(at, "a flag of Dynamo's worker; vLLM's own is chat-template", "replaced")
        elif name.startswith("dyn-"):
            _parser(name, args.pop(name), engines, launch)


def _parser(name: str, at: SourcedValue, engines: EngineLaunch, launch: Launch) -> None:
    ours = _PARSERS.get(name)
    if ours is None or at.value not in _SAME_PARSERS:
        launch.note(at, f"a flag of Dynamo's worker: vLLM has none like {name}={show.value(at.value)}", "served")
        return
    engines.args.setdefault(ours, at)
    if ours == "tool-call-parser":
        engines.args.setdefault("enable-auto-tool-choice", at.of(True))
    launch.note(at, f"a flag of Dynamo's worker; vLLM's own is {ours}", "replaced")


def _frontend(tracked: TrackedTree, launch: Launch) -> None:
    """Read the parsers that the frontend runs itself."""
    processor = tracked.tree.get("frontend", "args", "dyn-chat-processor")
    for name in _FRONTEND:
        if tracked.tree.get("frontend", "args", name) in (None, False):
            continue
        at = tracked.take("frontend", "args", name)
        if at is None:
            continue
        if processor != "vllm":
            launch.note(
                at, f"a flag of Dynamo's frontend, whose dyn-chat-processor is {show.value(processor)}", "served"
            )
            continue
        for engines in launch.roles.values():
            engines.args.setdefault(name, at)
        launch.note(at, f"vLLM's code in Dynamo's frontend; each engine has {name} itself", "replaced")


def _think(modes: list[SourcedValue], launch: Launch) -> None:
    """Read the modes of thinking into vLLM's default-chat-template-kwargs, with the keys that Dynamo sets
    (dynamo/frontend/thinking.py)."""
    if not modes:
        return
    first = modes[0]
    own = any(_KWARGS in engines.args for engines in launch.roles.values())
    if own or first.value not in ("enabled", "disabled") or any(at.value != first.value for at in modes):
        for at in modes:
            launch.note(at, f"not one default for all roles, or {_KWARGS} is there too", "served")
        return
    kwargs: Mapping[str, object] = {
        "thinking": first.value == "enabled",
        "enable_thinking": first.value == "enabled",
        "thinking_mode": first.value,
    }
    for engines in launch.roles.values():
        engines.args[_KWARGS] = first.of(dict(kwargs))
    for at in modes:
        launch.note(at, f"a flag of Dynamo's worker; vLLM's own is {_KWARGS}, here for all roles", "replaced")
