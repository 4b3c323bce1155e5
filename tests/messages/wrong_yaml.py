"""Text that is not YAML, or not the YAML that was meant: colons, tabs, quotes, invisible characters, files."""

from __future__ import annotations

from tests.messages.kit import GOOD, VALIDATE, Case, over, whole

SYNTAX = (
    over("a colon in a value", "description: Kimi: two nodes\n"),
    over("a comment behind a colon in a value", "description: a: b # see the wiki\n"),
    over("a line indented below a value", "mode: disaggregated\n  patches: auto\n", by_hand=True),
    over("no space after a colon", "decode:\n  instances:2\n  parallel: {tp: 4}\n"),
    over("no colon", "mode disaggregated\npatches: auto\n", by_hand=True),
    over("a tab behind a colon", "mode:\t@x\n", by_hand=True),
    over("keys that do not line up", "decode:\n  instances: 1\n   parallel: {tp: 4}\n", by_hand=True),
    over("a key less indented than its neighbours", "decode:\n    instances: 1\n  parallel: {tp: 4}\n", by_hand=True),
    whole("a first line that is indented", " schema: 1\nname: x\n", by_hand=True),
    over("a list item among keys", "decode:\n  instances: 1\n- parallel\n", by_hand=True),
    over("an item on the line of its key", "exclude_nodes: - gpu7\n"),
    over("a bracket that is not closed", "prefill:\n  devices: [0, 1, 2, 3\ndecode: {}\n", by_hand=True),
    over("a quote that is not closed", 'description: "two nodes\nmode: disaggregated\n', by_hand=True),
    over("text behind a quote", 'description: "two" nodes\n', by_hand=True),
    over("a backslash in double quotes", 'description: "C:\\models"\n', by_hand=True),
    over("a value that begins with @", "description: @home\n"),
    over("a value that begins with %", "description: %x\n"),
    over("a value that begins with >", "requires: \n  vllm: >=0.26\n"),
    over("a star that is not quoted", "proxy:\n  allowed_hosts: [*]\n", by_hand=True),
    over("an alias of nothing", "description: *bold\n"),
)
SURPRISES = (
    over("a hexadecimal number that is none", "proxy: {workers: 0x}\n"),
    over("no in a list of texts", "exclude_nodes: [no, 7]\n"),
)
INVISIBLE = (
    over("a no-break space in the indentation", "decode:\n\u00a0\u00a0instances: 1\n", by_hand=True),
    over("a no-break space behind a colon", "decode:\n  instances:\u00a01\n  parallel: {tp: 4}\n", by_hand=True),
    over("a no-break space behind a value", "mode: disaggregated\u00a0\n"),
    over("a zero-width space in a value", "mode: dis\u200baggregated\n"),
    over("a zero-width space in a key", "mo\u200bde: disaggregated\n", by_hand=True),
    over("a byte-order mark within a file", "\ufeffmode: disaggregated\n", by_hand=True),
    over("a no-break space in quotes", 'mode: "disaggregated\u00a0"\n'),
    Case("a no-break space on the command line", argv=(*VALIDATE, "--set", "prefill.instances=1\u00a0")),
    whole("a NUL byte", b"schema: 1\nname: a\0b\n", by_hand=True),
    whole("an escape character", GOOD.replace("name: good", "name: \x1b[1mgood"), by_hand=True),
    whole("UTF-16", ("\ufeff" + GOOD).encode("utf-16-le"), by_hand=True),
    whole(
        "line ends of Windows and a typo",
        GOOD.replace("mode", "mode").replace("lmcache:", "lmcahe:").replace("\n", "\r\n"),
    ),
)
FILES = (
    whole("a base that extends this file", "extends: recipe.yaml\n", by_hand=True),
    whole("a base named by a variable that is not set", "extends: ${BASE}\n", by_hand=True),
)
KINDS: tuple[tuple[Case, ...], ...] = (SYNTAX, SURPRISES, INVISIBLE, FILES)
