"""Shell scripts: which commands are run, and what a value is where that is not known."""

from __future__ import annotations

from tests.importing.kit import notes
from tests.importing.test_shell_script import asked, read
from tests.tables import each_row

SERVE = 'vllm serve org/model -tp "$TP"\n'


def tp(script: str, **given: str) -> int:
    """The devices of the server at the end of the script. TP has to be a name of the script's own."""
    document = read(script.replace("TP", "N") + SERVE.replace("TP", "N"), **given).document
    size = document["aggregated"].get("parallel", {}).get("tp", 1)
    assert isinstance(size, int)
    return size


def asks(script: str, **given: str) -> str:
    """The message that names what has to be given."""
    return asked(script.replace("TP", "N") + SERVE.replace("TP", "N"), **given)


@each_row("script, size", [
    ('TP=1; [ "$BIG" = 1 ] && TP=8\n', 1), ('TP=1; [ "$BIG" = 0 ] && TP=8\n', 8), ('TP=1; [ "$BIG" = 1 ] || TP=8\n', 8),
    ('TP=1; [ "$BIG" = 1 ] && TP=4 || TP=8\n', 8),
    ('TP=1; [[ "$BIG" = 1 ]] &&\n  TP=8\n', 1),
    ('TP=1; ! [ "$BIG" = 1 ] && TP=8\n', 8),
    ('TP=1; test "$BIG" = 1 && { echo big; TP=8; }\n', 1),
    ('TP=1; [ "$BIG" = 1 ] && echo big; TP=8\n', 8),
])  # fmt: skip
def test_what_follows_a_test_is_run_by_it(script: str, size: int) -> None:
    assert tp(script, BIG="0") == size


@each_row("joined", ["&&", "||"])
def test_what_follows_a_test_that_is_not_known_is_asked_for(joined: str) -> None:
    script = f'TP=1; [ "$BIG" = 1 ] {joined} TP=8\n'
    assert "--var BIG=..." in asks(script)
    assert "--var N=..." in asks(f"TP=1; nvidia-smi {joined} TP=8\n")


@each_row("test, size", [
    ('[ "$A" = 1 ] && [ "$B" = 1 ]', 2), ('[ "$A" = 1 ] || [ "$B" = 1 ]', 8), ('[[ "$A" = 1 && "$B" = 1 ]]', 2),
    ('[[ "$B" = 1 || "$A" = 1 ]]', 8), ('[ "$A" = 2 ] || [ "$B" = 1 ]', 2), ('! [ "$A" = 1 ]', 2),
    ('nvidia-smi && [ "$B" = 1 ]', 2),
])  # fmt: skip
def test_an_if_is_decided_by_all_of_its_tests(test: str, size: int) -> None:
    assert tp(f"if {test}; then TP=8; else TP=2; fi\n", A="1", B="0") == size


def test_an_if_of_several_tests_asks_for_what_decides_it() -> None:
    text = asks('if [ "$A" = 1 ] && [ "$B" = 1 ]; then TP=8; fi\n', A="1")
    assert "--var B=..." in text
    assert "--var A=..." not in text


def test_a_step_that_fails_only_with_the_whole_launch_is_taken_for_done() -> None:
    assert tp("cd /work && export TP=4\n") == 4
    assert "--var N=..." in asks("TP=1; cd /work || TP=4\n")


@each_row("script", [
    'TP=1; case "$MODE" in big) TP=8 ;; *) TP=2 ;; esac\n',
    'TP=1\ncase "$MODE" in\n  big|large)\n    TP=8\n    ;;\n  (*) TP=2;;\nesac\n',
    "TP=1; for each in 1 2; do TP=$each; done\n",
    "TP=1; f() { TP=4; }; TP=2; f\n",
    "TP=1; function f { TP=4; }; TP=2; if true; then f; fi\n",
    "TP=1; f()\n{\n  TP=4\n}\nTP=2\nf 3\n", "f() { TP=4; }\ng() { f; }\nTP=2\ng\n", "TP=1; read -r TP < file\n",
    "TP=1; (( TP *= 2 ))\n", "for TP in 1 2; do echo; done\n",
])  # fmt: skip
def test_what_depends_on_case_loops_and_functions_is_asked_for(script: str) -> None:
    assert "--var N=..." in asks(script, MODE="big")


def test_a_pattern_of_a_case_is_no_command() -> None:
    assert tp('TP=1; case "$MODE" in TP=8) echo ;; esac\n') == 1


def test_a_function_that_is_not_called_changes_nothing() -> None:
    draft = read("N=2; f() { N=4; export A=1; }\nvllm serve m -tp $N\n")
    assert draft.document["aggregated"]["parallel"] == {"tp": 2}
    assert "env" not in draft.document["aggregated"]


def test_a_group_is_run_as_what_is_around_it() -> None:
    script = "TP=1\nif false; then\n  cd /x || { echo no; exit 1; }\n  TP=8\nfi\n"
    assert tp(script) == 1
    assert tp("TP=1; { TP=8; }\n") == 8
    assert tp("TP=1; { false; } && TP=8\n") == 1
    assert tp("TP=1; ! { false; } && TP=8\n") == 8
    assert tp("TP=1; time { TP=8; }\n") == 8


def test_what_a_subshell_assigns_does_not_last() -> None:
    assert tp("TP=2; (cd /x; TP=8)\n") == 2
    draft = read("(\n  export A=1\n  cd /x && vllm serve m --seed 3\n) &\n")
    assert draft.document["aggregated"]["args"] == {"seed": 3}
    assert draft.document["aggregated"]["env"] == {"A": "1"}


def test_a_server_in_what_is_not_read_is_to_be_confirmed() -> None:
    draft = read("serve() {\n  vllm serve m --seed 3\n}\nserve\n")
    assert draft.document["aggregated"]["args"] == {"seed": 3}
    assert "function at line 1" in notes(draft, "confirm")["vllm serve"]
    assert "a command before it" in notes(read("nvidia-smi && vllm serve m\n"), "confirm")["vllm serve"]


def test_a_server_whose_test_does_not_hold_is_none() -> None:
    text = '[ "$A" = 1 ] && vllm serve org/a\n[ "$A" = 1 ] || vllm serve org/b\n'
    assert read(text, A="0").document["model"]["id"] == "org/b"


@each_row(
    "value, size",
    [("${X:-${Y:-4}}", 4), ("${X:-${Y:-${Z:-4}}}", 4), ("${E:-${F:-4}}", 8), ("${E-4}0", 0), ("${X:-4}", 4)],
)
def test_a_default_may_have_a_default(value: str, size: int) -> None:
    document = read(f"E=; F=8\nvllm serve m --seed {value}\n").document
    assert document["aggregated"]["args"] == {"seed": size}


def test_a_default_that_cannot_be_read_is_asked_for() -> None:
    assert "--var N=..." in asks("TP=${X:-${Y:-${Z:-${V:-${W:-4}}}}}\n")
    assert "--var Y=..." in asks("TP=${X:-$Y}\n")


@each_row("script", ["TP=8; TP=1 python warmup.py\n", "TP=8; TP=1 f=2 ./x\n"])
def test_an_assignment_before_a_command_is_of_that_command_alone(script: str) -> None:
    assert tp(script) == 8
