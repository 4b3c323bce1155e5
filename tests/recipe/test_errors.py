"""What a stranger reads when a recipe is wrong."""

from __future__ import annotations

from pathlib import Path

from tests.recipe.kit import CPU, GPU, refused
from tests.tables import each_row

SLIPS = """\
schema: 1
name: My Deployment
platform: gpu
model: {path: model, served_name: 405}
prefil: {instances: 2}
engine: {cache_reset_endpoint: yes}
prefill:
  instances: "2"
  gpu-memory-utilization: 0.9
  connector: {kind: moncake}
lmcache:
  on: prefill
  l1_size_gb: 0
ports: {decode: 82000}
"""


def test_all_slips_of_a_recipe_are_reported_at_once(tmp_path: Path) -> None:
    head, *lines = refused(tmp_path, SLIPS).splitlines()
    assert head == "recipe.yaml: 11 problems"
    assert [tuple(line.removeprefix("  | recipe.yaml:").split(": ")[:2]) for line in lines] == [
        ("2", "name"),
        ("3", "platform"),
        ("4", "model.served_name"),
        ("5", "prefil"),
        ("6", "engine.cache_reset_endpoint"),
        ("8", "prefill.instances"),
        ("9", "prefill.gpu-memory-utilization"),
        ("10", "prefill.connector.kind"),
        ("12", "lmcache.on"),
        ("13", "lmcache.l1_size_gb"),
        ("14", "ports.decode"),
    ]
    assert all(" -> " in line for line in lines)


def test_broken_rules_are_reported_together_with_wrong_values(tmp_path: Path) -> None:
    head, *lines = refused(tmp_path, CPU + "ports: {proxy: x, decode: 8100}\n").splitlines()
    assert head == "recipe.yaml: 2 problems"
    assert ["ports.proxy: " in lines[0], "ports.decode: " in lines[1]] == [True, True]


def test_what_only_follows_from_a_wrong_value_is_not_reported(tmp_path: Path) -> None:
    message = refused(tmp_path, CPU.replace("kind: lmcache-mp}", "kind: lmcache}"))
    assert message.startswith('recipe.yaml:12: prefill.connector.of.1.kind: no connector is called "lmcache"')
    assert message.endswith("did you mean lmcache-mp?")
    assert "problems" not in message


def test_both_places_of_a_contradiction_are_reported(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(CPU)
    message = refused(tmp_path, "extends: base.yaml\ndecode:\n  connector:\n    protocol: rdma\n")
    assert message.startswith("recipe.yaml:3: decode.connector: ")
    assert "(prefill.connector at base.yaml:8)" in message
    assert "write `protocol: tcp`" in message


@each_row("set_, expected", [
    ("prefil={}", "prefil: unknown key\n  what to do:   did you mean prefill?"),
    ("prefill.tp=2", "prefill.tp: unknown key\n  what to do:   did you mean prefill.parallel.tp?"),
    ("engine.max-model-len=2", "engine.max-model-len: unknown key\n  what to do:   vLLM flags go under engine.args"),
    ("decode.max_num_seqs=2", "vLLM flags go under decode.args: max-num-seqs"),
    ("l1_size_gb=2", "l1_size_gb: unknown key\n  what to do:   did you mean lmcache.l1_size_gb?"),
    ("lmcache.policy=LRU", "lmcache.policy: unknown key\n  what to do:   did you mean lmcache.eviction.policy?"),
    ("prefill.connector.of.0.proto=tcp", "prefill.connector.of.0.proto: unknown key\n  what to do:   did you mean p"),
    ("verify.output=exakt", 'expected one of exact and logprobs, got "exakt"\n  what to do:   did you mean exact?'),
    ("prefill.connector.of.1={kind: multi, of: []}", 'no connector is called "multi"'),
    ("prefill=[]", "prefill: expected a mapping, got a list"),
    ("description=12", "description: expected text, got 12\n  what to do:   put it in quotes: write"),
    ("engine.cache_reset_endpoint=No", "expected true or false"),
    ("engine.env.A=true", "engine.env.A: expected text, a whole number or {secret: NAME}, got true"),
    ("engine.env.A={secret: a-b}", "engine.env.A.secret: expected the name of an environment variable"),
    ("engine.args=[a]", "engine.args: expected a mapping, got a list"),
    ("requires={torch: '>=2'}", "requires.torch: versions can be required of vllm, lmcache and mooncake"),
])  # fmt: skip
def test_a_wrong_key_or_value_is_a_plain_sentence(tmp_path: Path, set_: str, expected: str) -> None:
    assert expected in refused(tmp_path, CPU, set_)


@each_row("key", ["schema", "name", "platform", "model"])
def test_a_missing_key_is_named_with_what_it_is_for(tmp_path: Path, key: str) -> None:
    message = refused(tmp_path, CPU, unset=(key,))
    assert f"{key}: missing" in message
    assert "what to do:" in message


def test_a_missing_size_of_l1_is_reported_with_why_there_is_no_default(tmp_path: Path) -> None:
    message = refused(tmp_path, GPU.replace("  l1_size_gb: 100\n", "  chunk_size: 256\n"))
    assert message.startswith("recipe.yaml:12: lmcache.l1_size_gb: missing")
    assert "the server has no default" in message
