"""The exact command line of an LMCache MP server (lmcache 0.5.6). It serves its own node only: loopback."""

from __future__ import annotations

from pdserve.plan.lmcache.patching import SERVER_MAIN
from pdserve.recipe.flags import SERVER_FLAGS, ServerLine, flag_words, own_flags
from pdserve.recipe.sections import Lmcache


def lmcache_argv(
    section: Lmcache,
    *,
    instance_id: str,
    staging: str,
    port: int,
    http_port: int,
    threads: int,
    on_cpu: bool,
    python: str,
    with_patches: bool = False,
) -> tuple[str, ...]:
    """`threads`: for transfers, unless the recipe says how many. `staging`: a name that no other server of the
    deployment has. `with_patches`: the server is started through the main that loads patches."""
    module = SERVER_MAIN if with_patches else "lmcache.v1.multiprocess.http_server"
    program = section.command if section.command is not None else [python, "-m", module]
    own = own_flags(
        SERVER_FLAGS,
        ServerLine(
            section=section,
            instance_id=instance_id,
            staging=staging,
            port=port,
            http_port=http_port,
            threads=threads,
            on_cpu=on_cpu,
        ),
    )
    free = {name: value for name, value in section.extra_args.items() if name not in own}
    return (*program, *flag_words({**own, **free}))
