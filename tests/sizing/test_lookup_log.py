"""`pdserve plan --lookup-log`: LMCache's own simulator over logs as LMCache's own server writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pdserve.cli.commands import app
from pdserve.errors import PdserveError, RecipeError
from pdserve.operations.lookups.replay import servers_in
from tests.sizing.kit import CONFIG
from tests.sizing.test_command import RECIPE, with_model

pytestmark = pytest.mark.process

CHUNK_BYTES = 256 * 4096
"""Of the model of kit.py: 4 KiB a token."""
WRITER = """\
import json, sys
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.subscribers.logging.lookup_hash import LookupHashLogConfig
from lmcache.v1.mp_observability.subscribers.logging.lookup_hash import LookupHashLoggingSubscriber

writer = LookupHashLoggingSubscriber(LookupHashLogConfig(output_dir=sys.argv[1]))
for metadata in json.load(sys.stdin):
    metadata["chunk_hashes"] = [bytes.fromhex(text) for text in metadata["chunk_hashes"]]
    [write] = writer.get_subscriptions().values()
    write(Event(event_type=EventType.MP_LOOKUP, session_id="s", metadata=metadata))
writer.shutdown()
"""


def lookup(prompt: int, chunks: int = 4, **changes: Any) -> dict[str, Any]:
    """Of one prompt of so many chunks and 76 tokens."""
    return {
        "request_id": "r",
        "model_name": "model",
        "chunk_size": 256,
        "seq_len": chunks * 256 + 76,
        "dtypes": ["torch.bfloat16"],
        "shapes": [[4, 256, 512]],
        "chunk_hashes": [f"{prompt:032x}{chunk:032x}" for chunk in range(chunks)],
        **changes,
    }


def written(folder: Path, lookups: Sequence[dict[str, Any]], seconds: float = 1.0) -> Path:
    """A log in the server's format, in its order. `seconds`: from one lookup to the next."""
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"timestamp": at * seconds, **each, "chunk_hashes": [f"0x{text}" for text in each["chunk_hashes"]]})
        for at, each in enumerate(lookups)
    ]
    (folder / "lookup_hashes_20261125_000823_000000.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    with_model(tmp_path / "model", CONFIG)
    path = tmp_path / "tiny.yaml"
    text = RECIPE.replace("{MODEL}", "{path: model, served_name: tiny}")
    multi = "{kind: multi, of: [{kind: mooncake, protocol: tcp}, {kind: lmcache-mp}]}"
    text = text.replace("prefill: {connector: {kind: mooncake, protocol: tcp}}", f"prefill: {{connector: {multi}}}")
    path.write_text(f"{text}lmcache: {{l1_size_gb: 1, transfer_mode: auto}}\n")
    return path


def plan(recipe: Path, log: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(recipe), "--lookup-log", str(log), *more])


def refused(recipe: Path, log: Path, *more: str) -> PdserveError:
    error = plan(recipe, log, *more).exception
    assert isinstance(error, PdserveError)
    return error


def rates(recipe: Path, log: Path, *more: str) -> list[dict[str, Any]]:
    done = plan(recipe, log, "--json", *more)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["hit_rates"]
    return found


def test_a_log_that_lmcache_itself_has_written_is_replayed(recipe: Path, tmp_path: Path) -> None:
    """Its types have the names of torch, which the simulator's own command line does not know: it needs the bytes."""
    lookups = json.dumps([lookup(prompt) for prompt in (1, 2, 1, 2)])
    argv = [sys.executable, "-c", WRITER, str(tmp_path / "log")]
    subprocess.run(argv, input=lookups, text=True, check=True, capture_output=True)
    [found] = rates(recipe, tmp_path / "log")
    assert found["source"] == f"cache simulator of lmcache {version('lmcache')}"
    assert (found["requests"], found["tokens"], found["chunks"]) == (4, 4400, 8)
    assert found["best"] == pytest.approx(2048 / 4400)


def test_nothing_that_needs_a_device_is_imported(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    [found] = rates(recipe, written(tmp_path / "log", [lookup(prompt) for prompt in (1, 2, 1, 2)]))
    assert found["best"] == pytest.approx(2048 / 4400)


def test_a_simulator_gets_its_package(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("lmcache")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = tmp_path / "packages" / "lmcache"
    copytree(Path(spec.submodule_search_locations[0]) / "tools", package / "tools")
    (package / "__init__.py").write_text("needed = True\n")
    with (package / "tools" / "cache_simulator" / "simulator.py").open("a") as simulator:
        simulator.write("\nfrom lmcache import needed\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    [found] = rates(recipe, written(tmp_path / "log", [lookup(prompt) for prompt in (1, 2, 1, 2)]))
    assert found["best"] == pytest.approx(2048 / 4400)


def test_the_proposed_size_holds_what_comes_again(recipe: Path, tmp_path: Path) -> None:
    """Forty prompts in turn: LRU has all of them or none. 160 MiB, in the 0.64 of L1 that an eviction leaves."""
    log = written(tmp_path / "log", [lookup(turn % 40) for turn in range(400)])
    [found] = rates(recipe, log)
    sizes = {round(size["l1_gib"], 3): (size["rate"]["low"], size["rate"]["high"]) for size in found["sizes"]}
    assert found["enough_gib"] == pytest.approx(160 / 0.64 / 1024, abs=0.01)
    assert sizes[1.0][0] == pytest.approx(found["best"])
    assert sizes[min(sizes)][1] == 0
    assert any(low == 0 and high == pytest.approx(found["best"]) for low, high in sizes.values())


RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "lookups" / "evictions.json").read_text())


@pytest.mark.parametrize("run", RECORDED["runs"], ids=lambda run: f"{run['evictions']}-evictions")
def test_an_l1_that_evicts_hits_as_a_real_server(recipe: Path, tmp_path: Path, run: dict[str, Any]) -> None:
    """Recorded with tests/upstream/probes/lmcache_hit_rates.py: 400 prompts. Chunks are 256 tokens here instead of 64,
    and as many fit in L1."""
    scale = 256 // RECORDED["chunk_tokens"]
    each = {"chunks": RECORDED["chunks_each"], "seq_len": RECORDED["tokens_each"] * scale}
    lookups = [lookup(prompt, **each) for prompt in RECORDED["prompts"]]
    log = written(tmp_path / "log", lookups, run["seconds_each"])
    [found] = rates(recipe, log, "--set", f"lmcache.l1_size_gb={run['l1_chunks'] * CHUNK_BYTES / 2**30}")
    now = found["now"]["rate"]
    returned = run["returned_tokens"] / (RECORDED["tokens_each"] * len(lookups))
    assert now["low"] < returned < now["high"] < found["best"]
    assert now["high"] - now["low"] < 0.1


def test_a_log_without_times_knows_nothing_of_how_fast_l1_fills(recipe: Path, tmp_path: Path) -> None:
    log = written(tmp_path / "log", [lookup(turn % 40) for turn in range(400)], 0.0)
    [found] = rates(recipe, log, "--set", "lmcache.l1_size_gb=0.19")
    assert (found["now"]["rate"]["low"], found["now"]["rate"]["high"]) == (0, 0)
    quick = written(tmp_path / "quick", [lookup(turn % 40) for turn in range(400)], 0.05)
    assert rates(recipe, quick, "--set", "lmcache.l1_size_gb=0.19")[0]["now"]["rate"]["high"] > 0.5


def test_an_l1_that_is_too_small_is_a_crossed_edge(recipe: Path, tmp_path: Path) -> None:
    log = written(tmp_path / "log", [lookup(turn % 40) for turn in range(400)])
    done = plan(recipe, log, "--set", "lmcache.l1_size_gb=0.1")
    assert done.exit_code == 0
    assert "hit rate, log: 0.1 GiB: 0.0% (this recipe)" in done.output
    assert "lmcache.l1_size_gb: with 0.1 GiB 0.0% of the tokens in log are hits at most" in done.output
    assert "write lmcache.l1_size_gb: 0.25" in done.output


def test_prompts_that_never_repeat_propose_nothing(recipe: Path, tmp_path: Path) -> None:
    done = plan(recipe, written(tmp_path / "log", [lookup(prompt) for prompt in range(30)]))
    assert done.exit_code == 0
    assert "none: nothing comes twice" in done.output


def test_each_server_has_its_own_rates(recipe: Path, tmp_path: Path) -> None:
    written(tmp_path / "logs" / "lmcache-0", [lookup(1), lookup(1)])
    written(tmp_path / "logs" / "lmcache-1", [lookup(1), lookup(2)])
    assert {each["server"]: each["best"] > 0 for each in rates(recipe, tmp_path / "logs")} == {
        "lmcache-0": True,
        "lmcache-1": False,
    }


def test_the_model_of_the_recipe_counts_where_the_log_has_several(recipe: Path, tmp_path: Path) -> None:
    mine = str(tmp_path / "model")
    log = written(tmp_path / "log", [lookup(1, model_name=mine), lookup(1, model_name=mine), lookup(2), lookup(2)])
    [found] = rates(recipe, log)
    assert (found["model"], found["requests"]) == (mine, 2)


# --- what is no log of this recipe


def test_several_models_none_of_which_is_the_recipes_are_named(recipe: Path, tmp_path: Path) -> None:
    error = refused(recipe, written(tmp_path / "log", [lookup(1, model_name="a"), lookup(1, model_name="b")]))
    assert "lookups of several models" in error.what


def test_chunks_of_another_size_are_refused_with_the_setting(recipe: Path, tmp_path: Path) -> None:
    error = refused(recipe, written(tmp_path / "log", [lookup(1, chunk_size=512)]))
    assert "chunks of 512 tokens, the recipe of 256" in error.what
    assert "--set lmcache.chunk_size=512" in str(error.todo)


@pytest.mark.parametrize("text", ["[1, 2]\n", "\x00\x01\n"])
def test_what_is_no_log_is_an_error_with_its_place(recipe: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "lookup_hashes_0.jsonl"
    file.write_text(text)
    error = refused(recipe, file)
    assert (error.exit_code, error.where) == (2, str(file))
    assert error.todo


def test_a_torn_line_hides_no_other(recipe: Path, tmp_path: Path) -> None:
    log = written(tmp_path / "log", [lookup(1), lookup(1)])
    [file] = log.iterdir()
    with file.open("a") as stream:
        stream.write('{"timestamp": 3, "chunk_ha')
    [found] = rates(recipe, log)
    assert found["requests"] == 2
    assert any("malformed" in note for note in found["notes"])


def test_a_recipe_without_lmcache_is_refused(recipe: Path, tmp_path: Path) -> None:
    log = written(tmp_path / "log", [lookup(1)])
    error = refused(recipe, log, "--unset", "lmcache", "--set", "prefill.connector={kind: mooncake, protocol: tcp}")
    assert "it has no LMCache server" in error.what


@pytest.mark.parametrize("name", ["nothing", "."])
def test_a_folder_without_a_log_is_an_error_with_what_makes_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="there is no") as caught:
        servers_in(tmp_path / name)
    assert "lmcache.lookup_log" in str(caught.value.todo)


def test_a_device_is_there_and_has_no_lookups() -> None:
    with pytest.raises(RecipeError) as caught:
        servers_in(Path("/dev/null"))
    assert caught.value.what == "this is neither a file nor a folder, so there are no lookups in it"
    assert caught.value.where == "/dev/null"
    assert "lmcache.lookup_log" in str(caught.value.todo)


def test_an_interpreter_without_lmcache_is_named(recipe: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    error = refused(recipe, written(tmp_path / "log", [lookup(1)]), "--set", f"engine.python={bare}")
    assert error.exit_code == 3
    assert f"there is no cache simulator of LMCache in {bare}: lmcache is not installed" in error.what
