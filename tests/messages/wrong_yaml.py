"""Text that is not YAML, or not the YAML that was meant: colons, tabs, quotes, invisible characters, files."""

from __future__ import annotations

from tests.messages.kit import CPU, GOOD, VALIDATE, Case, over, whole

SYNTAX = (
    over("a colon in a value", "description: Kimi: two nodes\n"),
    over("a colon in an item", "exclude_nodes:\n  - a: b: c\n", "exclude_nodes: [a]\n"),
    over("a comment behind a colon in a value", "description: a: b # see the wiki\n"),
    over(
        "a line indented below a value",
        "mode: disaggregated\n  patches: auto\n",
        "mode: disaggregated\npatches: auto\n",
    ),
    over("no space after a colon", "decode:\n  instances:2\n  parallel: {tp: 4}\n"),
    over("no colon", "mode disaggregated\npatches: auto\n", "mode: disaggregated\npatches: auto\n"),
    over("a tab in the indentation", "decode:\n\tinstances: 1\n", "decode:\n  instances: 1\n"),
    over("a tab behind a colon", "mode:\t@x\n", "mode: disaggregated\n"),
    over(
        "keys that do not line up",
        "decode:\n  instances: 1\n   parallel: {tp: 4}\n",
        "decode:\n  instances: 1\n  parallel: {tp: 4}\n",
    ),
    over(
        "a key less indented than its neighbours",
        "decode:\n    instances: 1\n  parallel: {tp: 4}\n",
        "decode:\n  instances: 1\n  parallel: {tp: 4}\n",
    ),
    whole("a first line that is indented", " schema: 1\nname: x\n", GOOD),
    over("a list item among keys", "decode:\n  instances: 1\n- parallel\n", "decode:\n  instances: 1\n"),
    over("an item on the line of its key", "exclude_nodes: - gpu7\n"),
    over(
        "a bracket that is not closed",
        "prefill:\n  devices: [0, 1, 2, 3\ndecode: {}\n",
        "prefill:\n  devices: [0, 1, 2, 3]\n",
    ),
    over(
        "a brace that is not closed",
        "decode: {parallel: {tp: 4}\nports: {proxy: 8001}\n",
        "decode: {parallel: {tp: 4}}\n",
    ),
    over("a quote that is not closed", 'description: "two nodes\nmode: disaggregated\n', 'description: "two nodes"\n'),
    over("text behind a quote", 'description: "two" nodes\n', 'description: "two nodes"\n'),
    over("a backslash in double quotes", 'description: "C:\\models"\n', "description: 'C:\\models'\n"),
    over("a value that begins with @", "description: @home\n"),
    over("a value that begins with %", "description: %x\n"),
    over("a value that begins with >", "requires: \n  vllm: >=0.26\n"),
    over("a star that is not quoted", "proxy:\n  allowed_hosts: [*]\n", 'proxy:\n  allowed_hosts: ["*"]\n'),
    over("an alias of nothing", "description: *bold\n"),
    over("a second document", "---\nmode: disaggregated\n", "mode: disaggregated\n"),
)
SURPRISES = (
    over("a key twice", "mode: disaggregated\nmode: disaggregated\n", "mode: disaggregated\n"),
    over(
        "a section twice",
        "decode: {instances: 1}\nports: {proxy: 8001}\ndecode: {parallel: {tp: 4}}\n",
        "decode: {instances: 1, parallel: {tp: 4}}\n",
    ),
    over("a merge key", "decode:\n  <<: {instances: 1}\n", "decode: {instances: 1}\n"),
    over("a tag", "description: !secret x\n", "description: x\n"),
    over("a tag of Python", "description: !!python/object/apply:os.system [ls]\n", "description: ls\n"),
    over("a number for a key", "prefill: {env: {1: x}}\n", "prefill: {env: {A1: x}}\n"),
    over("a boolean for a key", "true: x\n", ""),
    over("an alias within itself", "decode: &d\n  env: *d\n", "decode: {}\n"),
    over("a hexadecimal number that is none", "proxy: {workers: 0x}\n"),
    over("a sexagesimal time", "timeouts: {engine_seconds: 1:00:00}\n", "timeouts: {engine_seconds: 3600}\n"),
    over("no in a list of texts", "exclude_nodes: [no, 7]\n"),
    over("a time limit that is no time", "slurm: {time: 8h}\n", 'slurm: {time: "08:00:00"}\n'),
    whole("a list at the top", "- schema: 1\n", GOOD),
    whole("a word at the top", "recipe\n", GOOD),
    whole("an empty file", "# nothing\n", GOOD),
)
INVISIBLE = (
    over("a no-break space in the indentation", "decode:\n\u00a0\u00a0instances: 1\n", "decode:\n  instances: 1\n"),
    over(
        "a no-break space behind a colon",
        "decode:\n  instances:\u00a01\n  parallel: {tp: 4}\n",
        "decode:\n  instances: 1\n",
    ),
    over("a no-break space behind a value", "mode: disaggregated\u00a0\n"),
    over("a zero-width space in a value", "mode: dis\u200baggregated\n"),
    over("a zero-width space in a key", "mo\u200bde: disaggregated\n", "mode: disaggregated\n"),
    over("a byte-order mark within a file", "\ufeffmode: disaggregated\n", "mode: disaggregated\n"),
    over("a no-break space in quotes", 'mode: "disaggregated\u00a0"\n'),
    Case("a no-break space on the command line", argv=(*VALIDATE, "--set", "prefill.instances=1\u00a0")),
    over("a NUL in quotes", 'description: "a\\0b"\n', "description: ab\n"),
    over("half of a surrogate pair", 'description: "\\ud83d"\n', "description: x\n"),
    whole("a NUL byte", b"schema: 1\nname: a\0b\n", GOOD),
    whole("an escape character", GOOD.replace("name: good", "name: \x1b[1mgood"), GOOD),
    whole("UTF-16", ("\ufeff" + GOOD).encode("utf-16-le"), GOOD),
    whole("Latin-1", GOOD.encode() + b"description: K\xfchler Start\n", GOOD),
    whole(
        "line ends of Windows and a typo",
        GOOD.replace("mode", "mode").replace("lmcache:", "lmcahe:").replace("\n", "\r\n"),
    ),
)
FILES = (
    Case("a file that does not exist", argv=("validate", "kimi.yaml"), fixed=Case("", argv=VALIDATE)),
    Case("a slip in a file's name", argv=("validate", "recipie.yaml"), fixed=Case("", argv=VALIDATE)),
    Case("a file's name without its suffix", argv=("validate", "recipe"), fixed=Case("", argv=VALIDATE)),
    Case(
        "a shipped recipe without its folder",
        argv=("validate", "tiny.yaml"),
        files={"recipes/tiny.yaml": CPU},
        fixed=Case("", argv=("validate", "recipes/tiny.yaml"), files={"recipes/tiny.yaml": CPU}),
    ),
    Case(
        "a folder for a file",
        argv=("validate", "recipes"),
        files={"recipes/tiny.yaml": CPU},
        fixed=Case("", argv=("validate", "recipes/tiny.yaml"), files={"recipes/tiny.yaml": CPU}),
    ),
    Case("a folder that does not exist", argv=("validate", "recipies/tiny.yaml"), fixed=Case("", argv=VALIDATE)),
    whole("a base that does not exist", "extends: god.yaml\n", "extends: good.yaml\n"),
    whole("a base that is a folder", "extends: .\n", "extends: good.yaml\n"),
    whole("a base that extends this file", "extends: recipe.yaml\n", "extends: good.yaml\n"),
    whole("a number for a base", "extends: 3\n", "extends: good.yaml\n"),
    whole("a mapping for a base", "extends: {file: good.yaml}\n", "extends: [good.yaml]\n"),
    whole("a base named by a variable that is not set", "extends: ${BASE}\n", "extends: ${BASE:-good.yaml}\n"),
    Case("a mistake in the base", files={"good.yaml": GOOD.replace("tp: 4", "tp: four", 1)}, fixed=Case("")),
)
CASES = (*SYNTAX, *SURPRISES, *INVISIBLE, *FILES)
