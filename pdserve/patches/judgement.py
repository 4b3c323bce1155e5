"""What preflight asks the interpreter of the engines, before any engine is started.

`python -m pdserve.patches.judgement verdicts NAME...` prints {NAME: {"outcome", "why"}}; `... releases` prints
{package: release} for untagged builds that have the code of a release. One JSON object each; nothing of an engine is
imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

from pydantic import TypeAdapter

from pdserve.installed.distributions import installed
from pdserve.patches.here import judge_here, of_installed
from pdserve.patches.registry import find
from pdserve.patches.releases import same_code
from pdserve.patches.verdict import Verdict

MODULE = "pdserve.patches.judgement"
VERDICTS: TypeAdapter[dict[str, Verdict]] = TypeAdapter(dict[str, Verdict])
RELEASES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


def verdicts(names: Iterable[str]) -> Mapping[str, Verdict]:
    """As engines of this environment will judge these patches. Raises RecipeError for a name that it does not know."""
    return {name: judge_here(find(name)) for name in names}


def main() -> int:
    """Entry."""
    what, *names = sys.argv[1:]
    if what == "verdicts":
        answer = VERDICTS.dump_python(dict(verdicts(names)))
    else:
        answer = dict(same_code(installed(), of_installed))
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
