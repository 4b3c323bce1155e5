"""The `proxy:` section: settings that contradict each other, that the mode has no use for, or that open a door."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.effective import args_of, policy_of, roles
from pdserve.recipe.load.problems import Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import flag_path
from pdserve.roles import ENGINE_ROLES

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KNOWS_PREFIXES = ("prefix_aware", "kv_events")


def pools(recipe: Recipe) -> Iterator[Problem]:
    """Settings of a pool that the mode does not have would be ignored without a word."""
    proxy = recipe.proxy
    there = [name for name, _ in recipe.roles()]
    for section, settings in (("routing", proxy.routing), ("admission", proxy.admission)):
        for pool in ENGINE_ROLES:
            if pool not in there and pool in settings.model_fields_set:
                yield Problem(
                    ("proxy", section, pool),
                    f"mode {recipe.mode} has no pool {pool}",
                    f"set it for {' and '.join(there)}, or change the mode",
                    also=(("mode",),),
                )
    if recipe.mode == "aggregated":
        if proxy.on_empty_pool == "aggregate":
            yield Problem(
                ("proxy", "on_empty_pool"),
                "there is one pool, so no other pool can take over when it is empty",
                "write wait or fail",
                also=(("mode",),),
            )
        if proxy.routing.conditional is not None:
            yield Problem(
                ("proxy", "routing", "conditional"),
                "mode aggregated has no prefill that could be skipped",
                "remove it",
                also=(("mode",),),
            )


def conditions(recipe: Recipe) -> Iterator[Problem]:
    """Conditions that are never met, and sessions that nothing names."""
    routing = recipe.proxy.routing
    conditional, affinity = routing.conditional, routing.affinity
    path = ("proxy", "routing", "conditional")
    if conditional is not None:
        if conditional.min_prompt_tokens is None and conditional.max_missing_tokens is None:
            yield Problem(path, "has no threshold, so no prompt skips prefill", "set min_prompt_tokens, or remove it")
        if conditional.max_missing_tokens is not None and policy_of(recipe, "decode") not in _KNOWS_PREFIXES:
            yield Problem(
                (*path, "max_missing_tokens"),
                f"{policy_of(recipe, 'decode')} does not know what a decode holds, so this never applies",
                "set proxy.routing.decode: {kind: prefix_aware}",
                also=(("proxy", "routing", "decode"),),
            )
    if affinity is not None and affinity.header is None and not affinity.body_user:
        yield Problem(
            ("proxy", "routing", "affinity"), "nothing names a session", "set header, or body_user: true"
        )  # fmt: skip


def events(recipe: Recipe) -> Iterator[Problem]:
    """A policy that listens to engines which publish nothing."""
    flag = "enable-prefix-caching"
    for name, role, _ in roles(recipe):
        if policy_of(recipe, name) != "kv_events":
            continue
        here = ("proxy", "routing", name, "kind")
        if args_of(recipe, role).get(flag) is False:
            what = "there is no cache that an engine could publish events about"
            yield Problem(flag_path(recipe, name, flag), what, "remove the flag, or the policy", also=(here,))
        if role.parallel.dp > 1 and role.parallel.processes > 1:
            where = "on the nodes they run on" if role.parallel.nodes > 1 else "in processes of their own"
            yield Problem(
                here,
                f"the ranks of a {name} publish {where}, and the proxy listens at the first one only",
                "use prefix_aware",
                also=((name, "parallel"),),
            )


def times(recipe: Recipe) -> Iterator[Problem]:
    """A time within a shorter one."""
    proxy = recipe.proxy
    if proxy.health.timeout_seconds > proxy.health.interval_seconds:
        yield Problem(
            ("proxy", "health", "timeout_seconds"),
            f"a check may take {proxy.health.timeout_seconds:g} s and the next one is due after "
            f"{proxy.health.interval_seconds:g} s",
            "lower it, or raise interval_seconds",
            also=(("proxy", "health", "interval_seconds"),),
        )
    if "hold_seconds" in proxy.model_fields_set and proxy.on_empty_pool != "wait":
        yield Problem(
            ("proxy", "hold_seconds"),
            f"on_empty_pool is {proxy.on_empty_pool}, so no request waits for an engine",
            "remove it, or write on_empty_pool: wait",
            also=(("proxy", "on_empty_pool"),),
        )
    for name, _ in recipe.roles() if proxy.kind == "pdserve" else ():
        limits = getattr(proxy.admission, name)
        if limits.queue_seconds >= proxy.request_timeout_seconds:
            yield Problem(
                ("proxy", "admission", name, "queue_seconds"),
                f"a request that waits for {limits.queue_seconds:g} s has no time left of "
                f"{proxy.request_timeout_seconds:g} s",
                "lower it, or raise proxy.request_timeout_seconds",
                also=(("proxy", "request_timeout_seconds"),),
            )


def admin(recipe: Recipe) -> Iterator[Problem]:
    """Admin endpoints without a place, with two, or open to every client."""
    settings = recipe.proxy.admin
    if settings is None:
        return
    path = ("proxy", "admin")
    if (settings.port is None) == (settings.socket is None):
        what = "neither port nor socket is set" if settings.port is None else "both port and socket are set"
        yield Problem(path, what, "set one of them; a socket is reachable for this user only")
    if settings.socket is not None and "host" in settings.model_fields_set:
        yield Problem((*path, "host"), "a socket has no address", "remove it", also=((*path, "socket"),))
    if settings.port is not None and settings.host not in _LOOPBACK and settings.token_file is None:
        yield Problem(
            (*path, "host"),
            f"anybody who reaches {settings.host} could add and remove workers",
            "set token_file, or keep 127.0.0.1",
        )


def upstream_tls(recipe: Recipe) -> Iterator[Problem]:
    """TLS that no connection would use, or half of a certificate."""
    settings = recipe.proxy.upstream_tls
    if settings is None:
        return
    path = ("proxy", "upstream_tls")
    if recipe.proxy.kind == "pdserve" and recipe.proxy.admin is None:
        yield Problem(
            path,
            "only workers that are added while serving can have a URL of https, and without proxy.admin there are none",
            "set proxy.admin, or remove it",
        )
    if (settings.certificate is None) != (settings.key is None):
        lacking = "key" if settings.key is None else "certificate"
        yield Problem(path, f"our own certificate needs its {lacking} too", f"set {lacking}, or remove the other one")


def doors(recipe: Recipe) -> Iterator[Problem]:
    """Warnings: what others can read, use or change."""
    proxy = recipe.proxy
    if proxy.kind != "pdserve":
        return
    if proxy.host not in _LOOPBACK:
        if proxy.auth.keys_file is None:
            yield Problem(
                ("proxy", "host"),
                f"anybody who reaches {proxy.host} can use the model: the proxy asks for no key",
                "keep 127.0.0.1, or set proxy.auth.keys_file",
            )
        elif proxy.tls is None:
            yield Problem(
                ("proxy", "host"),
                f"keys and prompts travel to {proxy.host} in the clear",
                "set proxy.tls, or put a gateway that speaks TLS in front",
            )
    if proxy.cors is not None and "*" in proxy.cors.origins and proxy.auth.keys_file is None:
        yield Problem(
            ("proxy", "cors", "origins"),
            "any web page that a user of the proxy's network opens can use the model and read its answers",
            "name the origins, or set proxy.auth.keys_file",
        )
    settings = proxy.admin
    if settings is not None and settings.port is not None and settings.token_file is None:
        yield Problem(
            ("proxy", "admin", "port"),
            "every user of this machine can add and remove workers",
            "set token_file, or use socket",
        )
    if proxy.auth.client_authorization != "replace":
        yield Problem(
            ("proxy", "auth", "client_authorization"),
            "the engines of a deployment take only its own key, which is made at each start",
            "write replace, unless engine.command starts engines that ask for no key or for the client's",
        )
