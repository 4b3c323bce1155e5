#!/usr/bin/env bash
# qwen36-27b-lmcache: aggregated, cuda, 4 processes on 1 node(s).
# Rendered from the plan; `pdserve up` runs the same commands, and watches, proves and restarts them too.
# warning: whether this model's KV has several groups (windows, recurrent state) is not known: its config.json is not here; if it has, LMCache needs vllm >= 0.23, lmcache >= 0.4.7 and transfer mode lmcache_driven
# warning: the recipe qwen36-27b-lmcache is untested on the hardware that it names
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

RUN_DIR=/run/pdserve/qwen36-27b-lmcache
# All processes of a deployment share it: on several nodes export the same one everywhere.
export engine_key="${engine_key:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}"
mkdir -p "$RUN_DIR/logs"

# weights-0 (weights) on localhost: start stage -1, no devices
#   ports: none; log: logs/weights-0@localhost.log
#   ready: it has ended with code 0
run_weights_0() {
  unset engine_key
  export NO_PROXY=127.0.0.1,localhost,::1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=1800
  export no_proxy=127.0.0.1,localhost,::1
  exec python -m pdserve.weights \
    --model Qwen/Qwen3.6-27B \
    --record /run/pdserve/qwen36-27b-lmcache/weights/weights-0.json
}

# lmcache-0 (lmcache) on localhost: start stage 0, devices 0
#   ports: request 5555, http 8080; log: logs/lmcache-0@localhost.log
#   ready: http://127.0.0.1:8080/healthcheck answers 200, and /config names golden-lmcache-0
#   patches: lmcache-identity
run_lmcache_0() {
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME OMP_NUM_THREADS CUDA_HOME CUDA_PATH \
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES ROCM_PATH HIP_PATH
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export PDSERVE_PATCHES=lmcache-identity
  export PDSERVE_PATCH_RECORD=/run/pdserve/qwen36-27b-lmcache/patches/lmcache-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  exec python -m pdserve.patches.lmcache_server_main \
    --instance-id golden-lmcache-0 \
    --host 127.0.0.1 \
    --port 5555 \
    --http-host 127.0.0.1 \
    --http-port 8080 \
    --l1-size-gb 100 \
    --l1-init-size-gb 20 \
    --l1-read-ttl-seconds 7200 \
    --l1-write-ttl-seconds 600 \
    --chunk-size 784 \
    --max-workers 1 \
    --eviction-policy LRU \
    --eviction-trigger-watermark 0.8 \
    --eviction-ratio 0.2 \
    --supported-transfer-mode lmcache_driven \
    --worker-reap-timeout-seconds 120
}

# aggregated-0 (aggregated) on localhost: start stage 1, devices 0
#   ports: http 8300; log: logs/aggregated-0@localhost.log
#   ready: http://127.0.0.1:8300/health answers 200
#   patches: stale-completions, failed-loads-stand-back, lmcache-computed-count, lmcache-registration, lmcache-lookup-locks
run_aggregated_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NO_PROXY=127.0.0.1,localhost,::1
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,lmcache-computed-count,lmcache-registration,lmcache-lookup-locks
  export PDSERVE_PATCH_RECORD=/run/pdserve/qwen36-27b-lmcache/patches/aggregated-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=1800
  export VLLM_HOST_IP=127.0.0.1
  export VLLM_NO_USAGE_STATS=1
  export no_proxy=127.0.0.1,localhost,::1
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve Qwen/Qwen3.6-27B \
    --served-model-name qwen3.6-27b \
    --host 127.0.0.1 \
    --port 8300 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": "pdserve.connectors.lmcache_mp", "kv_role": "kv_both", "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5555, "lmcache.mp.mq_timeout": 60, "lmcache.mp.heartbeat_interval": 10, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}, "kv_load_failure_policy": "recompute"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enable-prefix-caching \
    --mamba-cache-mode align \
    --max-num-batched-tokens 1567 \
    --tool-call-parser qwen3_coder \
    --enable-auto-tool-choice \
    --reasoning-parser qwen3
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
  "served_name": "qwen3.6-27b",
  "protocol": "aggregated",
  "workers": [
    {
      "name": "aggregated-0",
      "role": "aggregated",
      "url": "http://127.0.0.1:8300",
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
    --config /run/pdserve/qwen36-27b-lmcache/proxy.json \
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
  weights-0) run_weights_0 ;;
  lmcache-0) run_lmcache_0 ;;
  aggregated-0) run_aggregated_0 ;;
  proxy) run_proxy ;;
  @localhost)
    trap stop_all EXIT
    finish weights-0 logs/weights-0@localhost.log
    await_all
    launch lmcache-0 logs/lmcache-0@localhost.log http://127.0.0.1:8080/healthcheck
    await_all
    launch aggregated-0 logs/aggregated-0@localhost.log http://127.0.0.1:8300/health
    launch proxy logs/proxy@localhost.log http://127.0.0.1:8000/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  *)
    echo "usage: $0 NAME        one process, in the foreground" >&2
    echo "       $0 @NODE       all processes of a node, in order, until one ends or Ctrl-C" >&2
    echo "names: weights-0 lmcache-0 aggregated-0 proxy" >&2
    echo "nodes: @localhost" >&2
    exit 2
    ;;
esac
