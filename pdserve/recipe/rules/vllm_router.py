"""`proxy.kind: vllm-router`: a setting that the router does not have is refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections.vllm_router import KIND, POLICIES, SETTINGS
from pdserve.roles import ENGINE_ROLES

_KIND: Path = ("proxy", "kind")
_OURS = "remove it, or write proxy.kind: pdserve"


def modes(recipe: Recipe) -> Iterator[Problem]:
    """Without prefill and decode it passes on the client's Authorization and has no key of its own (measured; its
    --api-key changes nothing), and clients have none that engines take."""
    if recipe.proxy.kind == KIND and recipe.mode == "aggregated":
        yield Problem(
            _KIND,
            "in mode aggregated vllm-router sends engines no key, and the engines of a deployment ask for one",
            "write kind: pdserve",
            also=(("mode",),),
        )


def settings(recipe: Recipe) -> Iterator[Problem]:
    """Keys that only pdserve's own proxy reads, and values that the router cannot take."""
    proxy = recipe.proxy
    if proxy.kind != KIND:
        return
    for key in sorted(proxy.model_fields_set - SETTINGS):
        yield Problem(("proxy", key), "vllm-router has no such setting", _OURS, also=(_KIND,))
    for key in sorted(proxy.routing.model_fields_set - {*ENGINE_ROLES}):
        yield Problem(("proxy", "routing", key), "vllm-router has no such setting", _OURS, also=(_KIND,))
    yield from _policies(recipe)
    times = {
        ("request_timeout_seconds",): proxy.request_timeout_seconds,
        ("health", "interval_seconds"): proxy.health.interval_seconds,
        ("health", "timeout_seconds"): proxy.health.timeout_seconds,
    }
    for path, seconds in times.items():
        if not float(seconds).is_integer():
            yield Problem(("proxy", *path), f"vllm-router takes whole seconds, not {seconds:g}", also=(_KIND,))


def doors(recipe: Recipe) -> Iterator[Problem]:
    """Warning: what others can use and change."""
    proxy = recipe.proxy
    if proxy.kind == KIND and proxy.host not in ("127.0.0.1", "localhost", "::1"):
        yield Problem(
            ("proxy", "host"),
            f"anybody who reaches {proxy.host} can use the model and remove workers: vllm-router asks for no key",
            "keep 127.0.0.1, and put a gateway in front that checks keys and passes on /v1 only",
            also=(_KIND,),
        )


def _policies(recipe: Recipe) -> Iterator[Problem]:
    routing = recipe.proxy.routing
    for pool, policy in (("prefill", routing.prefill), ("decode", routing.decode)):
        if pool not in routing.model_fields_set:
            continue
        path: Path = ("proxy", "routing", pool)
        if policy.kind not in POLICIES:
            yield Problem(
                (*path, "kind"),
                f"vllm-router has no policy like {policy.kind}",
                f"it has {', '.join(sorted(POLICIES))}",
                also=(_KIND,),
            )
            continue
        for knob in sorted(policy.model_fields_set - {"kind"}):
            yield Problem((*path, knob), "vllm-router has no such setting", _OURS, also=(_KIND,))
