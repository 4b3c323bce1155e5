"""Shell scripts: the words of the command that starts a server, and what stands around it."""

from __future__ import annotations

from pathlib import Path

from pdserve.importing.choice import ImportChoice
from pdserve.importing.formats import imported
from pdserve.importing.shell.lines import commands
from tests.importing.kit import notes
from tests.importing.test_shell_script import asked, read
from tests.messages.kit import run
from tests.tables import each_row


@each_row("behind", [
    "> server.log 2>&1 &", ">server.log 2>&1", "&> log", "&>>log", "2> err", "2>err >out", "> >(tee log) 2>&1",
    "<in 8>x",
])  # fmt: skip
def test_a_number_before_a_redirection_is_a_value_unless_it_touches_it(behind: str) -> None:
    document = read(f"vllm serve m --tensor-parallel-size 8 {behind}\n").document
    assert document["aggregated"]["parallel"] == {"tp": 8}
    assert "args" not in document["aggregated"]


def test_a_value_before_the_redirection_of_both_outputs_is_one_even_if_it_touches_it() -> None:
    assert read("vllm serve m --max-model-len 32768&> log\n").document["aggregated"]["args"] == {"max-model-len": 32768}


def test_a_backslash_at_the_end_of_a_line_in_double_quotes_is_no_text() -> None:
    ((echo, word),) = commands('echo "a \\\n  b\\\\\n c"\n')
    assert (echo.text, word.text) == ("echo", "a   b\\\n c")
    ((_, single),) = commands("echo 'a\\\nb'\n")
    assert single.text == "a\\\nb"


@each_row("word", ["\\;", "';'", '"("', '")"', "\\("])
def test_a_quoted_operator_is_a_word(word: str) -> None:
    assert [len(command) for command in commands(f"find . {word} x\ny\n")] == [4, 1]


def test_a_command_that_is_recorded_and_started_is_one_server() -> None:
    text = 'CMD=(vllm serve org/m --seed 3)\nwrite_command file "${CMD[@]}"\n"${CMD[@]}" > log 2>&1 &\n'
    draft = read(text)
    assert draft.document["aggregated"]["args"] == {"seed": 3}
    assert "write_command" not in notes(draft, "served")


@each_row("start", ['"${CMD[@]}"', 'exec "${CMD[@]}" > log 2>&1', "A=1 nohup ${CMD[@]} &"])
def test_a_command_in_an_array_is_started_where_the_array_is_expanded(start: str) -> None:
    text = f"CMD=(vllm serve org/m --seed 3)\nCMD+=(--enable-expert-parallel -tp 8)\n{start}\n"
    document = read(text).document
    assert document["model"]["id"] == "org/m"
    assert document["aggregated"]["parallel"] == {"tp": 8, "ep": True}
    assert document["aggregated"]["args"] == {"seed": 3}


def test_a_command_in_an_array_has_what_the_caller_gives_asked_for() -> None:
    text = 'local CMD=(numactl -m 0 vllm serve "$X" --port $PORT --seed 3)\nCMD+=(-tp "$N")\n"${CMD[@]}" --dtype auto\n'
    message = asked(text)
    assert "--var X=..." in message
    assert "--var N=..." in message
    assert "PORT" not in message, "pdserve sets the port"
    draft = read(text, X="org/x", N="2")
    assert draft.document["aggregated"]["args"] == {"seed": 3, "dtype": "auto"}
    assert [note.at.key for note in draft.losses()] == ["numactl"]


def test_a_command_that_is_not_known_is_asked_for() -> None:
    text = 'CMD=(vllm serve m)\nif [ "$BIG" = 1 ]; then CMD+=(-tp 8); fi\n"${CMD[@]}"\n'
    assert "--var BIG=..." in asked(text)
    assert read(text, BIG="1").document["aggregated"]["parallel"] == {"tp": 8}
    draft = read(f"{text}vllm serve org/other\n")
    assert "may start a server" in notes(draft, "confirm")["a command"]


def test_a_command_in_an_array_may_stand_behind_a_program() -> None:
    draft = read('CMD=(vllm serve m --seed 3)\necho "${CMD[@]}"\ntaskset -c 0 "${CMD[@]}" | tee log\n')
    assert draft.document["aggregated"]["args"] == {"seed": 3}
    assert list(notes(draft, "served")) == ["taskset"]


def test_a_function_that_is_given_a_command_may_start_it() -> None:
    draft = read('log() { echo "$@"; }\nCMD=(vllm serve m --seed 3)\nlog "${CMD[@]}"\nexec "${CMD[@]}"\n')
    assert draft.document["aggregated"]["args"] == {"seed": 3}
    assert notes(draft, "confirm")["a command"] == "what it runs is not known: it may start a server too"


def test_the_caller_gives_the_words_of_an_array_as_one_text() -> None:
    text = 'if which vllm; then CMD=(vllm serve); else CMD=(python); fi\nnohup "${CMD[@]}" m --seed 3 &\n'
    assert "--var CMD=..." in asked(text)
    document = read(text, CMD="vllm serve").document
    assert document["aggregated"]["args"] == {"seed": 3}


def test_an_array_without_its_index_is_its_first_word() -> None:
    document = read("A=(--seed=3 --dtype=auto)\nvllm serve m $A\n").document
    assert document["aggregated"]["args"] == {"seed": 3}


def test_an_array_that_is_only_assigned_starts_nothing() -> None:
    assert "no line `vllm serve` is run" in asked("CMD=(vllm serve m)\n")


def test_what_mentions_a_server_starts_none() -> None:
    assert read("echo vllm serve org/a\npkill -f vllm serve\nvllm serve org/b\n").document["model"]["id"] == "org/b"


def test_an_array_may_begin_as_a_text() -> None:
    document = read('A="--seed 3"; A+=(--max-num-seqs 4)\nvllm serve m ${A[@]}\n').document
    assert document["aggregated"]["args"] == {"seed": 3, "max-num-seqs": 4}


def test_a_local_array_keeps_its_options() -> None:
    document = read("declare -a A=(--seed 3)\nvllm serve m ${A[@]}\n").document
    assert document["aggregated"]["args"] == {"seed": 3}


def test_a_program_around_the_server_is_a_loss() -> None:
    draft = read("docker run --env=A=1 -e B=2 -v /m:/m myimage:1.2 vllm serve org/m\n")
    assert draft.document["aggregated"]["env"] == {"A": "1", "B": "2"}
    ((key, why),) = notes(draft, "served").items()
    assert key == "docker"
    assert why.endswith("docker run -v /m:/m myimage:1.2")


def test_each_program_around_the_server_is_named() -> None:
    draft = read("exec numactl --cpunodebind=0 --membind=0 env A=1 $WRAP vllm serve org/m\n")
    assert draft.document["aggregated"]["env"] == {"A": "1"}
    assert list(notes(draft, "served")) == ["numactl", "$WRAP"]


def test_a_secret_of_a_program_around_the_server_is_not_repeated() -> None:
    draft = read("srun --token=hunter2 --password hunter3 vllm serve org/m\n")
    assert "hunter" not in str(draft.notes)


@each_row("before", ["exec", "nohup", "env", "time nohup", "stdbuf -oL", "A=1 exec env"])
def test_what_changes_nothing_that_is_served_is_no_loss(before: str) -> None:
    assert read(f"{before} vllm serve org/m\n").losses() == []


def test_a_variable_that_is_taken_back_is_not_exported() -> None:
    assert "env" not in read("export X=1; unset X\nvllm serve m\n").document["aggregated"]
    assert "env" not in read("export X=1\nenv -u X vllm serve m\n").document["aggregated"]
    assert "env" not in read("export X=1; export -n X\nvllm serve m\n").document["aggregated"]
    assert read("X=1; declare -x X\nvllm serve m\n").document["aggregated"]["env"] == {"X": "1"}


def test_the_hardware_of_a_script_can_be_named(tmp_path: Path) -> None:
    def platform(hardware: str | None) -> tuple[str, bool]:
        draft = imported("export ROCM_X=1\nvllm serve m\n", "serve.sh", ImportChoice(hardware=hardware))
        return draft.document.get("platform", "cuda"), any(
            "--hardware" in why for why in notes(draft, "confirm").values()
        )

    assert platform(None) == ("rocm", True)
    assert platform("mi355x") == ("rocm", False)
    assert platform("b200") == ("cuda", False)
    (tmp_path / "serve.sh").write_text("vllm serve m\n")
    assert run(("import", "serve.sh", "--flags-from", "list", "--hardware", "mi355x"), tmp_path, {}).code == 0
