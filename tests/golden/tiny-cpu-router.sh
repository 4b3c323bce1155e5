#!/usr/bin/env bash
# tiny-cpu-router: disaggregated, cpu, 3 processes on 1 node(s).
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

RUN_DIR=/run/pdserve/tiny-cpu-router
# All processes of a deployment share it: on several nodes export the same one everywhere.
export engine_key="${engine_key:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}"
mkdir -p "$RUN_DIR/logs"

# prefill-0 (prefill) on localhost: start stage 1, no devices
#   ports: http 8100, bootstrap 8998; log: logs/prefill-0@localhost.log
#   ready: http://127.0.0.1:8100/health answers 200
#   patches: mooncake-prom-metrics, stale-completions, failed-loads-stand-back, mooncake-requests, mooncake-sends, mooncake-pulls, mooncake-bootstrap, mooncake-late-bootstrap, mooncake-cpu-device
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
  export MC_FORCE_TCP=1
  export MC_MAX_RPC_PORT=15099
  export MC_MIN_RPC_PORT=15000
  export NO_PROXY=127.0.0.1,localhost,::1
  export OMP_NUM_THREADS=1
  export PDSERVE_PATCHES=mooncake-prom-metrics,stale-completions,failed-loads-stand-back,mooncake-requests,mooncake-sends,mooncake-pulls,mooncake-bootstrap,mooncake-late-bootstrap,mooncake-cpu-device
  export PDSERVE_PATCH_RECORD=/run/pdserve/tiny-cpu-router/patches/prefill-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export VLLM_CPU_KVCACHE_SPACE=1
  export VLLM_CPU_OMP_THREADS_BIND=nobind
  export VLLM_ENABLE_V1_MULTIPROCESSING=0
  export VLLM_ENGINE_READY_TIMEOUT_S=300
  export VLLM_HOST_IP=127.0.0.1
  export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=60
  export VLLM_MOONCAKE_BOOTSTRAP_PORT=8998
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
    --kv-transfer-config '{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 10}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enforce-eager \
    --dtype float32 \
    --max-model-len 4096 \
    --max-num-seqs 16
}

# decode-0 (decode) on localhost: start stage 1, no devices
#   ports: http 8200; log: logs/decode-0@localhost.log
#   ready: http://127.0.0.1:8200/health answers 200
#   patches: mooncake-prom-metrics, stale-completions, failed-loads-stand-back, mooncake-requests, mooncake-sends, mooncake-pulls, mooncake-bootstrap, mooncake-late-bootstrap, mooncake-cpu-device
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
  export MC_FORCE_TCP=1
  export MC_MAX_RPC_PORT=15199
  export MC_MIN_RPC_PORT=15100
  export NO_PROXY=127.0.0.1,localhost,::1
  export OMP_NUM_THREADS=1
  export PDSERVE_PATCHES=mooncake-prom-metrics,stale-completions,failed-loads-stand-back,mooncake-requests,mooncake-sends,mooncake-pulls,mooncake-bootstrap,mooncake-late-bootstrap,mooncake-cpu-device
  export PDSERVE_PATCH_RECORD=/run/pdserve/tiny-cpu-router/patches/decode-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export VLLM_CPU_KVCACHE_SPACE=1
  export VLLM_CPU_OMP_THREADS_BIND=nobind
  export VLLM_ENABLE_V1_MULTIPROCESSING=0
  export VLLM_ENGINE_READY_TIMEOUT_S=300
  export VLLM_HOST_IP=127.0.0.1
  export VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=60
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
    --kv-transfer-config '{"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 10}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enforce-eager \
    --dtype float32 \
    --max-model-len 4096 \
    --max-num-seqs 16
}

# proxy (proxy) on localhost: start stage 2, no devices
#   ports: http 8000, metrics 29000; log: logs/proxy@localhost.log
#   ready: http://127.0.0.1:8000/liveness answers 200
run_proxy() {
  OPENAI_API_KEY="${engine_key:?}"
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD OPENAI_API_KEY
  unset engine_key
  export PYTHONUNBUFFERED=1
  export OPENAI_API_KEY
  exec python -m vllm_router.launch_router \
    --host 127.0.0.1 \
    --port 8000 \
    --vllm-pd-disaggregation \
    --kv-connector mooncake \
    --prefill http://127.0.0.1:8100 8998 \
    --decode http://127.0.0.1:8200 \
    --prefill-policy round_robin \
    --decode-policy round_robin \
    --request-timeout-secs 3600 \
    --max-payload-size 67108864 \
    --health-check-interval-secs 2 \
    --health-check-timeout-secs 2 \
    --health-failure-threshold 3 \
    --worker-startup-timeout-secs 30 \
    --worker-startup-check-interval 1 \
    --prometheus-host 127.0.0.1 \
    --prometheus-port 29000
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
    await_all
    launch proxy logs/proxy@localhost.log http://127.0.0.1:8000/liveness
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
