"""Each message has its fact: the line to write, the key that was meant, or what is wrong; and it says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.messages.kit import run
from tests.tables import each_row

GOOD = """\
schema: 1
name: good
platform: cuda
devices_per_node: 8
model:
  id: org/model
  revision: "0123456789abcdef0123456789abcdef01234567"
  served_name: model
prefill:
  parallel: {tp: 4}
decode:
  parallel: {tp: 4}
lmcache:
  l1_size_gb: 100
"""
HOSTS = "schema: 1\nhosts:\n  - name: gpu1\n  - name: gpu2\n"
EXTENDED = "extends: good.yaml\n"
VALIDATE = ("validate", "recipe.yaml")


@dataclass(frozen=True)
class Case:
    """`argv`: a command beside good.yaml, hosts.yaml and `files`; recipe.yaml builds on good.yaml."""

    fact: str
    argv: tuple[str, ...] = VALIDATE
    files: Mapping[str, str | bytes] = field(default_factory=dict)


def over(fact: str, text: str) -> Case:
    """A recipe that adds `text` to good.yaml."""
    return whole(fact, EXTENDED + text)


def whole(fact: str, text: str | bytes) -> Case:
    """A recipe that builds on nothing."""
    return Case(fact, files={"recipe.yaml": text})


def typed(fact: str, *argv: str) -> Case:
    return Case(fact, argv)


def cluster(fact: str, text: str) -> Case:
    argv = ("up", "good.yaml", "--cluster", "cluster.yaml", "--dry-run")
    return Case(fact, argv, {"cluster.yaml": text})


CASES = (
    # Keys
    over("did you mean prefill?", "prefil: {instances: 2}\n"),
    over("did you mean prefill?", "Prefill: {instances: 2}\n"),
    over("did you mean l1_size_gb?", "lmcache: {l1-size-gb: 64}\n"),
    over("verify.xyzzy: unknown key", "verify: {xyzzy: 1}\n"),
    over("did you mean instances?", "prefill: {instnaces: null}\n"),
    over("did you mean proxy.host?", "host: 0.0.0.0\n"),
    over("did you mean lmcache.l1_size_gb?", "l1_size_gb: 64\n"),
    over("did you mean protocol?", "decode: {connector: {kind: mooncake, proto: rdma}}\n"),
    typed("did you mean prefill?", *VALIDATE, "--set", "prefil.instances=2"),
    whole("`schema: 1`", GOOD.replace("schema: 1\n", "")),
    over("proxy.tls.key: missing", "proxy: {tls: {certificate: server.crt}}\n"),
    # Types
    over("`instances: 1`", "prefill: {instances: two}\n"),
    over("`instances: 2`", 'prefill: {instances: "2"}\n'),
    over("`instances: 1`", "prefill: {instances: 1.5}\n"),
    over("`tp: 2`", "decode: {parallel: {tp: 2.0}}\n"),
    over("`instances: 1`", "decode: {instances: true}\n"),
    over("expected true or false", "engine:\n  cache_reset_endpoint: yes\n"),
    over("expected true or false", 'model: {download: "false"}\n'),
    over('`served_name: "405"`', "model: {served_name: 405}\n"),
    over('`account: "0123"`', "slurm:\n  account: 0123\n"),
    over('`qos: "true"`', "slurm: {partition: on, qos: true}\n"),
    over("`schema: 1`", "schema: 2\n"),
    over("a name of lower-case letters", "name: My Deployment\n"),
    over('`VLLM_USE_V1: "true"`', "engine:\n  env: {NCCL_DEBUG: off, VLLM_USE_V1: true}\n"),
    over('lmcache.on: expected a list, got "prefill"', "lmcache: {on: prefill}\n"),
    # Ranges and units
    over("a number of GiB, without the unit", "lmcache: {l1_size_gb: 64GiB}\n"),
    over("a number of seconds, without the unit", "timeouts:\n  engine_seconds: 1h\n"),
    over("`max_body_bytes: 67108864`", "proxy: {max_body_bytes: 64MiB}\n"),
    over("`instances: 1`", "prefill: {instances: 0}\n"),
    over("`tp: 1`", "decode:\n  parallel: {tp: -4}\n"),
    over("prefill.instances: prefill 600 x 4 +", "prefill:\n  instances: 600\n"),
    over("`proxy: 8000`", "ports: {proxy: 80000}\n"),
    over("`stop_seconds: 30`", "timeouts: {stop_seconds: -1}\n"),
    over("a number of seconds, without the unit", "timeouts: {engine_seconds: .inf}\n"),
    typed("`--set ports.proxy=8000`", *VALIDATE, "--set", "ports.proxy=80000"),
    # Short forms
    over("`connector: {kind: mooncake}`", "decode: {connector: mooncake}\n"),
    over("`connector: {kind: mooncake}`", "decode: {connector: MooncakeConnector}\n"),
    over("`connector: {kind: mooncake, protocol: rdma}`", "decode: {connector: {protocol: rdma}}\n"),
    over("did you mean mooncake?", "decode: {connector: {kind: moncake}}\n"),
    over("`prefill: {kind: least_loaded}`", "proxy: {routing: {prefill: least_loaded}}\n"),
    typed("`--set 'decode.connector={kind: mooncake}'`", *VALIDATE, "--set", "decode.connector=mooncake"),
    # Texts
    over("not YAML: mapping values are not allowed here, at column 18", "description: Kimi: two nodes\n"),
    over('`"7"`', "exclude_nodes: [no, 7]\n"),
    over("did you mean disaggregated?", 'mode: "disaggregated\xa0"\n'),
    whole("the file is UTF-16, not UTF-8", ("\ufeff" + GOOD).encode("utf-16-le")),
    whole("did you mean lmcache?", GOOD.replace("lmcache:", "lmcahe:").replace("\n", "\r\n")),
    # What does not go together
    over("prefill.parallel: an instance of prefill needs", "lmcache: null\nprefill: {parallel: {tp: 16}}\n"),
    over("`prefill: 8101`", "ports: {proxy: 8100}\n"),
    # Commands
    typed("--slurm: there is no sbatch on", "up", "recipe.yaml", "--slurm"),
    typed("--slurm submits a job, and --dry-run starts", "up", "recipe.yaml", "--slurm", "--dry-run"),
    typed("--slurm submits a job, and --cluster takes", "up", "recipe.yaml", "--slurm", "--cluster", "hosts.yaml"),
    typed("--slurm submits a job, and --this-machine takes", "up", "recipe.yaml", "--slurm", "--this-machine"),
    typed("--slurm submits a job, and --replace", "up", "recipe.yaml", "--slurm", "--replace"),
    typed("--slurm submits a job, and --keep-on-failure", "up", "recipe.yaml", "--slurm", "--keep-on-failure"),
    typed("--slurm submits the job of a", "up", "--slurm"),
    typed("--cluster names the hosts to use", "up", "recipe.yaml", "--cluster", "hosts.yaml", "--this-machine"),
    typed("--slurm is a script and --json", "render", "recipe.yaml", "--slurm", "--json"),
    typed("No such option: --sett (Possible options", *VALIDATE, "--sett", "ports.proxy=8001"),
    typed("No such command 'valdate'. Did you", "valdate", "recipe.yaml"),
    typed("Missing argument 'recipe'", "validate"),
    typed("Got unexpected extra argument(s) (prefill.instances=2)", *VALIDATE, "prefill.instances=2"),
    typed("this is a cluster file, not", "validate", "hosts.yaml"),
    typed("home: no deployment called 'good' was", "status", "good"),
    typed("--min-gbps belongs to --fabric", "preflight", "good.yaml", "--min-gbps", "10"),
    typed("--dry-run belongs to --prune", "list", "--dry-run"),
    # Cluster files
    cluster("did you mean hosts?", "schema: 1\nhost:\n  - name: gpu1\n"),
    cluster("hosts.2.name: gpu1 is there twice (hosts.0.name", HOSTS + "  - name: gpu1\n"),
    cluster("`connect_seconds: 10`", HOSTS + "ssh: {connect_seconds: 10s}\n"),
)
_USAGE = ("`", "give one of", "belongs to", "Did you mean", "Possible options", "Missing arg", "unexpected extra arg")
"""The last four are of the command line's own parser, whose usage line says what is wanted."""


@each_row("case", CASES)
def test_a_message_has_its_fact_and_what_to_do(case: Case, tmp_path: Path) -> None:
    there = {"good.yaml": GOOD, "hosts.yaml": HOSTS, "recipe.yaml": EXTENDED, **case.files}
    for name, text in there.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    shown = run(case.argv, tmp_path, {}).err
    assert case.fact in shown
    if shown.startswith("Usage:"):
        assert any(words in shown for words in _USAGE), shown
    else:
        assert "  what to do:   " in shown, shown
