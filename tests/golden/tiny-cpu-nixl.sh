#!/usr/bin/env bash
# tiny-cpu-nixl: disaggregated, cpu, 3 processes on 1 node(s).
# Rendered from the plan; `pdserve up` runs the same commands, and watches, proves and restarts them too.
set -euo pipefail

# Unsets every exported variable that none of its arguments names; PREFIX_* names all that begin with PREFIX_.
keep_only() {
  local name rule
  for name in $(compgen -e); do
    for rule; do
      case $name in $rule) continue 2 ;; esac
    done
    unset "$name"
  done
}

RUN_DIR=/run/pdserve/tiny-cpu-nixl
# All processes of a deployment share it: on several nodes export the same one everywhere.
export engine_key="${engine_key:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}"
mkdir -p "$RUN_DIR/logs"

# prefill-0 (prefill) on localhost: start stage 1, no devices
#   ports: http 8100, nixl 5600; log: logs/prefill-0@localhost.log
#   ready: http://127.0.0.1:8100/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
#   CPUs: part 1 of 2 of the node's (by hand: taskset --cpu-list)
run_prefill_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_PLUGINS LMCACHE_USE_UPSTREAM_MP \
    LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export HF_HUB_OFFLINE=1
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NO_PROXY=127.0.0.1,localhost,::1
  export OMP_NUM_THREADS=1
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/tiny-cpu-nixl/patches/prefill-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export VLLM_CPU_KVCACHE_SPACE=1
  export VLLM_CPU_OMP_THREADS_BIND=nobind
  export VLLM_ENABLE_V1_MULTIPROCESSING=0
  export VLLM_ENGINE_READY_TIMEOUT_S=300
  export VLLM_HOST_IP=127.0.0.1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_SERVER_DEV_MODE=1
  export no_proxy=127.0.0.1,localhost,::1
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.openai.api_server \
    --model /opt/pdserve/.cache/tiny-model \
    --served-model-name tiny \
    --host 127.0.0.1 \
    --port 8100 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enforce-eager \
    --dtype float32 \
    --max-model-len 4096 \
    --max-num-seqs 16
}

# decode-0 (decode) on localhost: start stage 1, no devices
#   ports: http 8200, nixl 5601; log: logs/decode-0@localhost.log
#   ready: http://127.0.0.1:8200/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
#   CPUs: part 2 of 2 of the node's (by hand: taskset --cpu-list)
run_decode_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_PLUGINS LMCACHE_USE_UPSTREAM_MP \
    LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export HF_HUB_OFFLINE=1
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NO_PROXY=127.0.0.1,localhost,::1
  export OMP_NUM_THREADS=1
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/tiny-cpu-nixl/patches/decode-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export VLLM_CPU_KVCACHE_SPACE=1
  export VLLM_CPU_OMP_THREADS_BIND=nobind
  export VLLM_ENABLE_V1_MULTIPROCESSING=0
  export VLLM_ENGINE_READY_TIMEOUT_S=300
  export VLLM_HOST_IP=127.0.0.1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5601
  export VLLM_NO_USAGE_STATS=1
  export VLLM_SERVER_DEV_MODE=1
  export no_proxy=127.0.0.1,localhost,::1
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.openai.api_server \
    --model /opt/pdserve/.cache/tiny-model \
    --served-model-name tiny \
    --host 127.0.0.1 \
    --port 8200 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enforce-eager \
    --dtype float32 \
    --max-model-len 4096 \
    --max-num-seqs 16
}

# proxy (proxy) on localhost: start stage 1, no devices
#   ports: http 8000; log: logs/proxy@localhost.log
#   ready: http://127.0.0.1:8000/health answers 200
#   by hand there is no launcher that reports ready workers, hence --no-control
run_proxy() {
  cat >"$RUN_DIR/proxy.json" <<'END_OF_FILE'
{
  "host": "127.0.0.1",
  "prewarm": true,
  "request_timeout_seconds": 3600.0,
  "connect_timeout_seconds": 5.0,
  "on_empty_pool": "wait",
  "hold_seconds": 60.0,
  "drain_seconds": 30.0,
  "max_body_bytes": 67108864,
  "routing": {
    "prefill": {
      "kind": "least_loaded"
    },
    "decode": {
      "kind": "least_loaded"
    },
    "aggregated": {
      "kind": "least_loaded"
    },
    "load": {
      "kv_weight": 32.0,
      "slack_tokens": 4096,
      "slack_requests": 8,
      "slack_ratio": 1.5,
      "max_kv_usage": 0.95
    },
    "affinity": null,
    "conditional": null
  },
  "admission": {
    "prefill": {
      "max_requests": null,
      "max_kv_usage": null,
      "max_prompt_tokens_in_flight": null,
      "queue_size": 512,
      "queue_seconds": 60.0
    },
    "decode": {
      "max_requests": null,
      "max_kv_usage": null,
      "max_prompt_tokens_in_flight": null,
      "queue_size": 512,
      "queue_seconds": 60.0
    },
    "aggregated": {
      "max_requests": null,
      "max_kv_usage": null,
      "max_prompt_tokens_in_flight": null,
      "queue_size": 512,
      "queue_seconds": 60.0
    },
    "priority_header": "x-vllm-priority"
  },
  "breaker": {
    "failures": 5,
    "open_seconds": 10.0
  },
  "health": {
    "interval_seconds": 2.0,
    "timeout_seconds": 2.0,
    "failures": 3
  },
  "limits": {
    "max_header_bytes": 65536,
    "header_seconds": 10.0,
    "body_idle_seconds": 30.0,
    "body_seconds": 300.0,
    "keep_alive_seconds": 75.0,
    "max_connections": 8192,
    "max_buffered_bytes": null,
    "write_buffer_bytes": 262144
  },
  "allowed_hosts": null,
  "cors": null,
  "forward_headers": [],
  "auth": {
    "keys_file": null,
    "client_authorization": "replace"
  },
  "tls": null,
  "upstream_tls": null,
  "admin": null,
  "log": "text",
  "otel": null,
  "port": 8000,
  "served_name": "tiny",
  "protocol": "nixl",
  "workers": [
    {
      "name": "prefill-0",
      "role": "prefill",
      "url": "http://127.0.0.1:8100",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0",
      "role": "decode",
      "url": "http://127.0.0.1:8200",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    }
  ],
  "transfer_slots": 20,
  "kv_lease_seconds": 30.0,
  "processes": 1
}
END_OF_FILE
  PDSERVE_ENGINE_KEY="${engine_key:?}"
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD PDSERVE_ENGINE_KEY
  unset engine_key
  export PYTHONUNBUFFERED=1
  export PDSERVE_ENGINE_KEY
  exec python -m pdserve.proxy \
    --config /run/pdserve/tiny-cpu-nixl/proxy.json \
    --no-control
}

# launch NAME LOG URL: starts a process in the background, into its log; URL is where it will say that it is ready.
launch() {
  "run_${1//-/_}" >>"$RUN_DIR/$2" 2>&1 &
  started+=("$!")
  if [ -n "$3" ]; then waiting+=("$1 $3"); fi
  echo "$1: PID $!, log $RUN_DIR/$2"
}

# finish NAME LOG: runs a process to its end; the next ones need what it leaves.
finish() {
  echo "$1: runs, log $RUN_DIR/$2"
  ("run_${1//-/_}") >>"$RUN_DIR/$2" 2>&1 || { echo "$1 failed; its log says why" >&2; exit 4; }
}

await_all() {
  local entry name url pid
  for entry in ${waiting[@]+"${waiting[@]}"}; do
    read -r name url <<<"$entry"
    until curl --silent --fail --output /dev/null --max-time 3 "$url"; do
      for pid in "${started[@]}"; do
        kill -0 "$pid" 2>/dev/null || { echo "PID $pid died; its log says why" >&2; exit 4; }
      done
      sleep 0.5
    done
    echo "$name: ready"
  done
  waiting=()
}

stop_all() {
  kill ${started[@]+"${started[@]}"} 2>/dev/null || true
  wait
}

started=()
waiting=()
case "${1:-}" in
  prefill-0) run_prefill_0 ;;
  decode-0) run_decode_0 ;;
  proxy) run_proxy ;;
  @localhost)
    trap stop_all EXIT
    launch prefill-0 logs/prefill-0@localhost.log http://127.0.0.1:8100/health
    launch decode-0 logs/decode-0@localhost.log http://127.0.0.1:8200/health
    launch proxy logs/proxy@localhost.log http://127.0.0.1:8000/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  *)
    echo "usage: $0 NAME        one process, in the foreground" >&2
    echo "       $0 @NODE       all processes of a node, in order, until one ends or Ctrl-C" >&2
    echo "names: prefill-0 decode-0 proxy" >&2
    echo "nodes: @localhost" >&2
    exit 2
    ;;
esac
