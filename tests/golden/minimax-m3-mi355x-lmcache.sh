#!/usr/bin/env bash
# minimax-m3-mi355x-lmcache: aggregated, rocm, 8 processes on 1 node(s).
# Rendered from the plan; `pdserve up` runs the same commands, and watches, proves and restarts them too.
# warning: LMCache on ROCm must be a ROCm build: PyPI's wheel has CUDA kernels only and falls back to a CPU copy that is not ordered with the device's stream, which can store wrong KV (lmcache#4870, lmcache#4419); install a -rocm wheel of LMCache's releases, or build it with BUILD_WITH_HIP=1
# warning: whether this model's KV has several groups (windows, recurrent state) is not known: its config.json is not here; if it has, LMCache needs vllm >= 0.23, lmcache >= 0.4.7 and transfer mode lmcache_driven
# warning: the recipe minimax-m3-mi355x-lmcache is untested on the hardware that it names
# warning: aggregated: with lmcache_driven the start or the first reload hangs on some ROCm stacks (lmcache#4419; seen with ROCm 7.14 and vllm 0.23, and with ROCm 7.2.3 at the start on gfx950: MI350X, MI355X; not with ROCm 7.2.3 and vllm 0.27): let `pdserve verify` prove a reload; where it hangs, set lmcache.env.LMCACHE_ROCM_HOST_EVENTS: 1 (patch lmcache-host-events), or lmcache.transfer_mode: engine_driven. Not the change that the issue proposes: with it KV is copied before it is written
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

RUN_DIR=/run/pdserve/minimax-m3-mi355x-lmcache
# All processes of a deployment share it: on several nodes export the same one everywhere.
export engine_key="${engine_key:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}"
mkdir -p "$RUN_DIR/logs"

# weights-0 (weights) on localhost: start stage -1, no devices
#   ports: none; log: logs/weights-0@localhost.log
#   ready: it has ended with code 0
run_weights_0() {
  unset engine_key
  export NO_PROXY=127.0.0.1,localhost,::1
  export PYTHONNOUSERSITE=1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800
  export VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16=0
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB=256
  export VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1
  export VLLM_ROCM_USE_AITER=1
  export VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1
  export VLLM_ROCM_USE_AITER_MOE=1
  export VLLM_USE_BREAKABLE_CUDAGRAPH=0
  export no_proxy=127.0.0.1,localhost,::1
  exec python -m pdserve.weights \
    --model amd/MiniMax-M3-MXFP4 \
    --record /run/pdserve/minimax-m3-mi355x-lmcache/weights/weights-0.json
}

# weights-1 (weights) on localhost: start stage -1, no devices
#   ports: none; log: logs/weights-1@localhost.log
#   ready: it has ended with code 0
run_weights_1() {
  unset engine_key
  export NO_PROXY=127.0.0.1,localhost,::1
  export PYTHONNOUSERSITE=1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800
  export VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16=0
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB=256
  export VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1
  export VLLM_ROCM_USE_AITER=1
  export VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1
  export VLLM_ROCM_USE_AITER_MOE=1
  export VLLM_USE_BREAKABLE_CUDAGRAPH=0
  export no_proxy=127.0.0.1,localhost,::1
  exec python -m pdserve.weights \
    --model Inferact/MiniMax-M3-EAGLE3-GQA \
    --record /run/pdserve/minimax-m3-mi355x-lmcache/weights/weights-1.json
}

# lmcache-0 (lmcache) on localhost: start stage 0, devices 0,1,2,3
#   ports: request 5555, http 8080; log: logs/lmcache-0@localhost.log
#   ready: http://127.0.0.1:8080/healthcheck answers 200, and /config names golden-lmcache-0
#   patches: lmcache-identity
run_lmcache_0() {
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME OMP_NUM_THREADS CUDA_HOME CUDA_PATH \
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES ROCM_PATH HIP_PATH 'HSA_*'
  unset engine_key
  export HIP_VISIBLE_DEVICES=0,1,2,3
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export PDSERVE_PATCHES=lmcache-identity
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-mi355x-lmcache/patches/lmcache-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  exec python -m pdserve.patches.lmcache_server_main \
    --instance-id golden-lmcache-0 \
    --host 127.0.0.1 \
    --port 5555 \
    --http-host 127.0.0.1 \
    --http-port 8080 \
    --l1-size-gb 75 \
    --l1-init-size-gb 10 \
    --l1-read-ttl-seconds 7200 \
    --l1-write-ttl-seconds 600 \
    --chunk-size 256 \
    --max-workers 2 \
    --eviction-policy LRU \
    --eviction-trigger-watermark 0.8 \
    --eviction-ratio 0.2 \
    --supported-transfer-mode lmcache_driven \
    --worker-reap-timeout-seconds 120
}

# lmcache-1 (lmcache) on localhost: start stage 0, devices 0,1,2,3
#   ports: request 5556, http 8081; log: logs/lmcache-1@localhost.log
#   ready: http://127.0.0.1:8081/healthcheck answers 200, and /config names golden-lmcache-1
#   patches: lmcache-identity
run_lmcache_1() {
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME OMP_NUM_THREADS CUDA_HOME CUDA_PATH \
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES ROCM_PATH HIP_PATH 'HSA_*'
  unset engine_key
  export HIP_VISIBLE_DEVICES=0,1,2,3
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export PDSERVE_PATCHES=lmcache-identity
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-mi355x-lmcache/patches/lmcache-1
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  exec python -m pdserve.patches.lmcache_server_main \
    --instance-id golden-lmcache-1 \
    --host 127.0.0.1 \
    --port 5556 \
    --http-host 127.0.0.1 \
    --http-port 8081 \
    --l1-size-gb 75 \
    --l1-init-size-gb 10 \
    --l1-read-ttl-seconds 7200 \
    --l1-write-ttl-seconds 600 \
    --chunk-size 256 \
    --max-workers 2 \
    --eviction-policy LRU \
    --eviction-trigger-watermark 0.8 \
    --eviction-ratio 0.2 \
    --supported-transfer-mode lmcache_driven \
    --worker-reap-timeout-seconds 120
}

# lmcache-2 (lmcache) on localhost: start stage 0, devices 0,1,2,3
#   ports: request 5557, http 8082; log: logs/lmcache-2@localhost.log
#   ready: http://127.0.0.1:8082/healthcheck answers 200, and /config names golden-lmcache-2
#   patches: lmcache-identity
run_lmcache_2() {
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME OMP_NUM_THREADS CUDA_HOME CUDA_PATH \
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES ROCM_PATH HIP_PATH 'HSA_*'
  unset engine_key
  export HIP_VISIBLE_DEVICES=0,1,2,3
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export PDSERVE_PATCHES=lmcache-identity
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-mi355x-lmcache/patches/lmcache-2
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  exec python -m pdserve.patches.lmcache_server_main \
    --instance-id golden-lmcache-2 \
    --host 127.0.0.1 \
    --port 5557 \
    --http-host 127.0.0.1 \
    --http-port 8082 \
    --l1-size-gb 75 \
    --l1-init-size-gb 10 \
    --l1-read-ttl-seconds 7200 \
    --l1-write-ttl-seconds 600 \
    --chunk-size 256 \
    --max-workers 2 \
    --eviction-policy LRU \
    --eviction-trigger-watermark 0.8 \
    --eviction-ratio 0.2 \
    --supported-transfer-mode lmcache_driven \
    --worker-reap-timeout-seconds 120
}

# lmcache-3 (lmcache) on localhost: start stage 0, devices 0,1,2,3
#   ports: request 5558, http 8083; log: logs/lmcache-3@localhost.log
#   ready: http://127.0.0.1:8083/healthcheck answers 200, and /config names golden-lmcache-3
#   patches: lmcache-identity
run_lmcache_3() {
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD XDG_CACHE_HOME OMP_NUM_THREADS CUDA_HOME CUDA_PATH \
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES ROCM_PATH HIP_PATH 'HSA_*'
  unset engine_key
  export HIP_VISIBLE_DEVICES=0,1,2,3
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export PDSERVE_PATCHES=lmcache-identity
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-mi355x-lmcache/patches/lmcache-3
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  exec python -m pdserve.patches.lmcache_server_main \
    --instance-id golden-lmcache-3 \
    --host 127.0.0.1 \
    --port 5558 \
    --http-host 127.0.0.1 \
    --http-port 8083 \
    --l1-size-gb 75 \
    --l1-init-size-gb 10 \
    --l1-read-ttl-seconds 7200 \
    --l1-write-ttl-seconds 600 \
    --chunk-size 256 \
    --max-workers 2 \
    --eviction-policy LRU \
    --eviction-trigger-watermark 0.8 \
    --eviction-ratio 0.2 \
    --supported-transfer-mode lmcache_driven \
    --worker-reap-timeout-seconds 120
}

# aggregated-0 (aggregated) on localhost: start stage 1, devices 0,1,2,3
#   ports: http 8300; log: logs/aggregated-0@localhost.log
#   ready: http://127.0.0.1:8300/health answers 200
#   patches: stale-completions, failed-loads-stand-back, lmcache-computed-count, lmcache-registration, lmcache-lookup-locks
run_aggregated_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING CUDA_VISIBLE_DEVICES \
    GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES
  unset engine_key
  export HIP_VISIBLE_DEVICES=0,1,2,3
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NO_PROXY=127.0.0.1,localhost,::1
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,lmcache-computed-count,lmcache-registration,lmcache-lookup-locks
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-mi355x-lmcache/patches/aggregated-0
  export PYTHONHASHSEED=0
  export PYTHONNOUSERSITE=1
  export PYTHONUNBUFFERED=1
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1800
  export VLLM_HOST_IP=127.0.0.1
  export VLLM_NO_USAGE_STATS=1
  export VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16=0
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4
  export VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB=256
  export VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT=1
  export VLLM_ROCM_USE_AITER=1
  export VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=1
  export VLLM_ROCM_USE_AITER_MOE=1
  export VLLM_USE_BREAKABLE_CUDAGRAPH=0
  export no_proxy=127.0.0.1,localhost,::1
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve amd/MiniMax-M3-MXFP4 \
    --served-model-name minimax-m3 \
    --host 127.0.0.1 \
    --port 8300 \
    --tensor-parallel-size 4 \
    --kv-transfer-config '{"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": "pdserve.connectors.lmcache_mp", "kv_role": "kv_both", "kv_connector_extra_config": {"lmcache.mp.server_urls": ["tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"], "lmcache.mp.mq_timeout": 600.0, "lmcache.mp.heartbeat_interval": 10, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}, "kv_load_failure_policy": "recompute"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enable-prefix-caching \
    --trust-remote-code \
    --block-size 128 \
    --gpu-memory-utilization 0.85 \
    --enable-chunked-prefill \
    --max-num-batched-tokens 32768 \
    --max-num-seqs 64 \
    --language-model-only \
    --attention-backend TRITON_ATTN \
    --moe-backend aiter \
    --kv-cache-dtype fp8 \
    --tool-call-parser minimax_m3 \
    --enable-auto-tool-choice \
    --reasoning-parser minimax_m3 \
    --default-chat-template-kwargs '{"thinking_mode": "enabled"}' \
    --stream-interval 20 \
    --hf-overrides '{"text_config": {"use_index_cache": true, "index_topk_freq": 4}}' \
    --speculative-config '{"method": "eagle3", "model": "Inferact/MiniMax-M3-EAGLE3-GQA", "num_speculative_tokens": 3, "attention_backend": "TRITON_ATTN"}'
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
  "served_name": "minimax-m3",
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
    --config /run/pdserve/minimax-m3-mi355x-lmcache/proxy.json \
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
  lmcache-1) run_lmcache_1 ;;
  lmcache-2) run_lmcache_2 ;;
  lmcache-3) run_lmcache_3 ;;
  aggregated-0) run_aggregated_0 ;;
  proxy) run_proxy ;;
  @localhost)
    trap stop_all EXIT
    finish weights-0 logs/weights-0@localhost.log
    finish weights-1 logs/weights-1@localhost.log
    await_all
    launch lmcache-0 logs/lmcache-0@localhost.log http://127.0.0.1:8080/healthcheck
    launch lmcache-1 logs/lmcache-1@localhost.log http://127.0.0.1:8081/healthcheck
    launch lmcache-2 logs/lmcache-2@localhost.log http://127.0.0.1:8082/healthcheck
    launch lmcache-3 logs/lmcache-3@localhost.log http://127.0.0.1:8083/healthcheck
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
    echo "names: weights-0 weights-1 lmcache-0 lmcache-1 lmcache-2 lmcache-3 aggregated-0 proxy" >&2
    echo "nodes: @localhost" >&2
    exit 2
    ;;
esac
