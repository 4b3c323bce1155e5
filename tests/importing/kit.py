"""Small launch files in the shapes that other tools have, written for these tests, and reading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.formats import import_launch
from pdserve.importing.launch import Draft, Effect, ImportChoice
from pdserve.operations.import_recipe import ImportedRecipe, import_file

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'

_MODEL = """\
name: Small_Model-1p2d
model:
  path: hf:org/small-model
  container: registry.example/vllm:v1
  precision: fp8
resources:
  gpu_type: gb200
  gpus_per_node: 4
"""
_ENVIRONMENT = """\
environment:
  ETCD_LEASE_TTL: "60"
  PYTHONHASHSEED: "7"
"""
_PREFILL = f"""\
      kv-transfer-config: '{NIXL}'
      tensor-parallel-size: 1
      data-parallel-size: 4
      data-parallel-rpc-port: 13345
      enable-expert-parallel: true
      no-enable-prefix-caching: true
      max-model-len: 4096
      compilation-config: '{{"cudagraph_mode": "PIECEWISE"}}'
"""
_DECODE = f"""\
      kv-transfer-config: '{NIXL}'
      tensor-parallel-size: 8
      enable-expert-parallel: false
      max-model-len: 4096
      max-num-seqs: 64
"""
_JOB = """\
sbatch_directives:
  mem: "0"
  exclude: gpu7
slurm:
  time_limit: "8:00:00"
health_check:
  max_attempts: 360
  interval_seconds: 10
benchmark:
  type: sa-bench
  isl: 1024
"""

SCHEMA_1 = f"""\
{_MODEL}  prefill_nodes: 1
  decode_nodes: 4
  prefill_workers: 1
  decode_workers: 2
  gpus_per_prefill: 4
  gpus_per_decode: 8
{_ENVIRONMENT}backend:
  type: vllm
  connector: null
  prefill_environment: &shared
    NCCL_CUMEM_ENABLE: "1"
    VLLM_SERVER_DEV_MODE: "1"
    CACHE_DIR: /tmp/cache-{{job_id}}
  decode_environment: *shared
  vllm_config:
    prefill:
{_PREFILL}    decode:
{_DECODE}frontend:
  type: dynamo
{_JOB}"""

SCHEMA_2 = f"""\
schema: 2
{_MODEL}{_ENVIRONMENT}engine:
  type: vllm
  connector: null
roles:
  prefill:
    nodes: 1
    workers: 1
    gpus: 4
    env: &shared
      NCCL_CUMEM_ENABLE: "1"
      VLLM_SERVER_DEV_MODE: "1"
      CACHE_DIR: /tmp/cache-{{job_id}}
    args:
{_PREFILL}  decode:
    nodes: 4
    workers: 2
    gpus: 8
    env: *shared
    args:
{_DECODE}frontend:
  type: dynamo
services:
  - {{name: etcd, type: etcd}}
{_JOB}"""


def read(text: str, variant: str | None = None) -> Draft:
    """The draft of a launch file called launch.yaml."""
    return import_launch(text, "launch.yaml", ImportChoice(variant))


def whole(text: str, folder: Path, variant: str | None = None) -> ImportedRecipe:
    """The recipe as `pdserve import` prints it: loaded and planned."""
    file = folder / "launch.yaml"
    file.write_text(text)
    return import_file(file, ImportChoice(variant), environ={})


def refused(text: str, variant: str | None = None) -> RecipeError:
    """The error of a file that cannot be imported."""
    with pytest.raises(RecipeError) as caught:
        read(text, variant)
    assert caught.value.todo
    return caught.value


def notes(draft: Draft, effect: Effect) -> dict[str, str]:
    """Key -> why, of what has this effect."""
    return {note.at.key: note.why for note in draft.notes if note.effect == effect}
