#!/usr/bin/env bash
# kimi-mi355x-2node: disaggregated, rocm, 6 processes on 2 node(s).
# Rendered from the plan; `pdserve up` runs the same commands, and watches, proves and restarts them too.
# warning: LMCache on ROCm must be a ROCm build: PyPI's wheel has CUDA kernels only and falls back to a CPU copy that is not ordered with the device's stream, which can store wrong KV (lmcache#4870, lmcache#4419); install a -rocm wheel of LMCache's releases, or build it with BUILD_WITH_HIP=1
# warning: whether this model's KV has several groups (windows, recurrent state) is not known: its config.json is not here; if it has, LMCache needs vllm >= 0.23, lmcache >= 0.4.7 and transfer mode lmcache_driven
# warning: the recipe kimi-mi355x-2node is untested on the hardware that it names
# warning: prefill: with lmcache_driven the start or the first reload hangs on some ROCm stacks (lmcache#4419; seen with ROCm 7.14 and vllm 0.23, and with ROCm 7.2.3 at the start on gfx950: MI350X, MI355X; not with ROCm 7.2.3 and vllm 0.27): let `pdserve verify` prove a reload; where it hangs, set lmcache.env.LMCACHE_ROCM_HOST_EVENTS: 1 (patch lmcache-host-events), or lmcache.transfer_mode: engine_driven. Not the change that the issue proposes: with it KV is copied before it is written
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

RUN_DIR=/run/pdserve/kimi-mi355x-2node
# All processes of a deployment share it: on several nodes export the same one everywhere.
export engine_key="${engine_key:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}"
mkdir -p "$RUN_DIR/logs"

# weights-0 (weights) on node0: start stage -1, no devices
#   ports: none; log: logs/weights-0@node0.log
#   ready: it has ended with code 0
run_weights_0() {
  unset engine_key
  export AITER_MXFP4_INTERMEDIATE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  export PYTHONNOUSERSITE=1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1200
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4
  export VLLM_ROCM_USE_AITER=1
  export VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1
  export VLLM_ROCM_USE_AITER_RMSNORM=1
  export VLLM_ROCM_USE_SKINNY_GEMM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  exec python -m pdserve.weights \
    --model amd/Kimi-K2.5-MXFP4 \
    --record /run/pdserve/kimi-mi355x-2node/weights/weights-0.json
}

# weights-1 (weights) on node1: start stage -1, no devices
#   ports: none; log: logs/weights-1@node1.log
#   ready: it has ended with code 0
run_weights_1() {
  unset engine_key
  export AITER_MXFP4_INTERMEDIATE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  export PYTHONNOUSERSITE=1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1200
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4
  export VLLM_ROCM_USE_AITER=1
  export VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1
  export VLLM_ROCM_USE_AITER_RMSNORM=1
  export VLLM_ROCM_USE_SKINNY_GEMM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  exec python -m pdserve.weights \
    --model amd/Kimi-K2.5-MXFP4 \
    --record /run/pdserve/kimi-mi355x-2node/weights/weights-1.json
}

# lmcache-0 (lmcache) on node0: start stage 0, devices 0,1,2,3,4,5,6,7
#   ports: request 5555, http 8080; log: logs/lmcache-0@node0.log
#   ready: http://127.0.0.1:8080/healthcheck answers 200, and /config names golden-lmcache-0
#   patches: lmcache-identity
run_lmcache_0() {
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME OMP_NUM_THREADS CUDA_HOME CUDA_PATH \
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES ROCM_PATH HIP_PATH 'HSA_*'
  unset engine_key
  export HIP_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export PDSERVE_PATCHES=lmcache-identity
  export PDSERVE_PATCH_RECORD=/run/pdserve/kimi-mi355x-2node/patches/lmcache-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  exec python -m pdserve.patches.lmcache_server_main \
    --instance-id golden-lmcache-0 \
    --host 127.0.0.1 \
    --port 5555 \
    --http-host 127.0.0.1 \
    --http-port 8080 \
    --l1-size-gb 900 \
    --l1-init-size-gb 20 \
    --l1-read-ttl-seconds 7200 \
    --l1-write-ttl-seconds 600 \
    --chunk-size 256 \
    --max-workers 8 \
    --eviction-policy LRU \
    --eviction-trigger-watermark 0.8 \
    --eviction-ratio 0.2 \
    --supported-transfer-mode lmcache_driven \
    --worker-reap-timeout-seconds 120
}

# prefill-0 (prefill) on node0: start stage 1, devices 0,1,2,3,4,5,6,7
#   ports: http 8100, bootstrap 8998; log: logs/prefill-0@node0.log
#   ready: http://198.51.100.1:8100/health answers 200
#   patches: multiconnector-prom-metrics, mooncake-prom-metrics, multiconnector-selection, stale-completions, failed-loads-stand-back, load-timeout, lmcache-lost-send, lmcache-computed-count, lmcache-registration, mooncake-requests, mooncake-sends, mooncake-pulls, mooncake-bootstrap, mooncake-late-bootstrap, lmcache-lookup-locks
run_prefill_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING CUDA_VISIBLE_DEVICES \
    GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES
  unset engine_key
  export AITER_MXFP4_INTERMEDIATE=1
  export HIP_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export MC_FORCE_TCP=1
  export MC_MAX_RPC_PORT=15099
  export MC_MIN_RPC_PORT=15000
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  export PDSERVE_PATCHES=multiconnector-prom-metrics,mooncake-prom-metrics,multiconnector-selection,stale-completions,failed-loads-stand-back,load-timeout,lmcache-lost-send,lmcache-computed-count,lmcache-registration,mooncake-requests,mooncake-sends,mooncake-pulls,mooncake-bootstrap,mooncake-late-bootstrap,lmcache-lookup-locks
  export PDSERVE_PATCH_RECORD=/run/pdserve/kimi-mi355x-2node/patches/prefill-0
  export PYTHONHASHSEED=0
  export PYTHONNOUSERSITE=1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1200
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=480
  export VLLM_MOONCAKE_BOOTSTRAP_PORT=8998
  export VLLM_NO_USAGE_STATS=1
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4
  export VLLM_ROCM_USE_AITER=1
  export VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1
  export VLLM_ROCM_USE_AITER_RMSNORM=1
  export VLLM_ROCM_USE_SKINNY_GEMM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve amd/Kimi-K2.5-MXFP4 \
    --served-model-name kimi-k2.5 \
    --host 198.51.100.1 \
    --port 8100 \
    --tensor-parallel-size 8 \
    --kv-transfer-config '{"kv_connector": "MultiConnector", "kv_connector_module_path": "pdserve.connectors.multi", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": [{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 10}}, {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": "pdserve.connectors.lmcache_mp", "kv_role": "kv_both", "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": 5555, "lmcache.mp.mq_timeout": 1200.0, "lmcache.mp.heartbeat_interval": 10, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}}], "load_timeout_seconds": 300.0}, "kv_load_failure_policy": "recompute"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enable-prefix-caching \
    --trust-remote-code \
    --max-model-len 262144 \
    --max-num-seqs 32 \
    --block-size 16 \
    --kv-cache-dtype fp8 \
    --gpu-memory-utilization 0.9 \
    --mm-encoder-tp-mode data \
    --tool-call-parser kimi_k2 \
    --enable-auto-tool-choice \
    --reasoning-parser kimi_k2 \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}'
}

# decode-0 (decode) on node1: start stage 1, devices 0,1,2,3,4,5,6,7
#   ports: http 8200; log: logs/decode-0@node1.log
#   ready: http://198.51.100.2:8200/health answers 200
#   patches: mooncake-prom-metrics, stale-completions, failed-loads-stand-back, mooncake-requests, mooncake-sends, mooncake-pulls, mooncake-bootstrap, mooncake-late-bootstrap
run_decode_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING CUDA_VISIBLE_DEVICES \
    GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES
  unset engine_key
  export AITER_MXFP4_INTERMEDIATE=1
  export HIP_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export MC_FORCE_TCP=1
  export MC_MAX_RPC_PORT=15099
  export MC_MIN_RPC_PORT=15000
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  export PDSERVE_PATCHES=mooncake-prom-metrics,stale-completions,failed-loads-stand-back,mooncake-requests,mooncake-sends,mooncake-pulls,mooncake-bootstrap,mooncake-late-bootstrap
  export PDSERVE_PATCH_RECORD=/run/pdserve/kimi-mi355x-2node/patches/decode-0
  export PYTHONHASHSEED=0
  export PYTHONNOUSERSITE=1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1200
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=480
  export VLLM_NO_USAGE_STATS=1
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4
  export VLLM_ROCM_USE_AITER=1
  export VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1
  export VLLM_ROCM_USE_AITER_RMSNORM=1
  export VLLM_ROCM_USE_SKINNY_GEMM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve amd/Kimi-K2.5-MXFP4 \
    --served-model-name kimi-k2.5 \
    --host 198.51.100.2 \
    --port 8200 \
    --tensor-parallel-size 8 \
    --kv-transfer-config '{"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 10}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --trust-remote-code \
    --max-model-len 262144 \
    --max-num-seqs 32 \
    --block-size 16 \
    --kv-cache-dtype fp8 \
    --gpu-memory-utilization 0.9 \
    --mm-encoder-tp-mode data \
    --tool-call-parser kimi_k2 \
    --enable-auto-tool-choice \
    --reasoning-parser kimi_k2 \
    --enable-prefix-caching \
    --compilation-config '{"cudagraph_mode": "PIECEWISE"}'
}

# proxy (proxy) on node0: start stage 1, no devices
#   ports: http 8000; log: logs/proxy@node0.log
#   ready: http://127.0.0.1:8000/health answers 200
#   by hand there is no launcher that reports ready workers, hence --no-control
run_proxy() {
  cat >"$RUN_DIR/proxy.json" <<'END_OF_FILE'
{
  "host": "0.0.0.0",
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
    "keys_file": "/opt/pdserve/recipes/kimi-mi355x-2node.keys.jsonl",
    "client_authorization": "replace"
  },
  "tls": null,
  "upstream_tls": null,
  "admin": null,
  "log": "text",
  "otel": null,
  "port": 8000,
  "served_name": "kimi-k2.5",
  "protocol": "mooncake",
  "workers": [
    {
      "name": "prefill-0",
      "role": "prefill",
      "url": "http://198.51.100.1:8100",
      "bootstrap_url": "http://198.51.100.1:8998",
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0",
      "role": "decode",
      "url": "http://198.51.100.2:8200",
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
    --config /run/pdserve/kimi-mi355x-2node/proxy.json \
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
  weights-1) run_weights_1 ;;
  lmcache-0) run_lmcache_0 ;;
  prefill-0) run_prefill_0 ;;
  decode-0) run_decode_0 ;;
  proxy) run_proxy ;;
  @node0)
    trap stop_all EXIT
    finish weights-0 logs/weights-0@node0.log
    await_all
    launch lmcache-0 logs/lmcache-0@node0.log http://127.0.0.1:8080/healthcheck
    await_all
    launch prefill-0 logs/prefill-0@node0.log http://198.51.100.1:8100/health
    launch proxy logs/proxy@node0.log http://127.0.0.1:8000/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  @node1)
    trap stop_all EXIT
    finish weights-1 logs/weights-1@node1.log
    await_all
    launch decode-0 logs/decode-0@node1.log http://198.51.100.2:8200/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  *)
    echo "usage: $0 NAME        one process, in the foreground" >&2
    echo "       $0 @NODE       all processes of a node, in order, until one ends or Ctrl-C" >&2
    echo "names: weights-0 weights-1 lmcache-0 prefill-0 decode-0 proxy" >&2
    echo "nodes: @node0 @node1" >&2
    exit 2
    ;;
esac
