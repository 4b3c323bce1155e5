#!/usr/bin/env bash
# minimax-m3-gb300-store: disaggregated, cuda, 14 processes on 4 node(s).
# Rendered from the plan; `pdserve up` runs the same commands, and watches, proves and restarts them too.
# warning: the recipe minimax-m3-gb300-store is untested on the hardware that it names
# warning: the proxy listens on 127.0.0.1 of node0, the first node of the job: no client on the login node or on another node reaches it; set proxy.host: 0.0.0.0 with proxy.auth.keys_file (pdserve new-key NAME --file FILE), which then decides who may ask, or run the clients on that node
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

RUN_DIR=/run/pdserve/minimax-m3-gb300-store
# All processes of a deployment share it: on several nodes export the same one everywhere.
export engine_key="${engine_key:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}"
mkdir -p "$RUN_DIR/logs"

# weights-0 (weights) on node0: start stage -1, no devices
#   ports: none; log: logs/weights-0@node0.log
#   ready: it has ended with code 0
run_weights_0() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model nvidia/MiniMax-M3-NVFP4 \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-0.json
}

# weights-1 (weights) on node0: start stage -1, no devices
#   ports: none; log: logs/weights-1@node0.log
#   ready: it has ended with code 0
run_weights_1() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model Inferact/MiniMax-M3-EAGLE3-GQA \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-1.json
}

# weights-2 (weights) on node1: start stage -1, no devices
#   ports: none; log: logs/weights-2@node1.log
#   ready: it has ended with code 0
run_weights_2() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model nvidia/MiniMax-M3-NVFP4 \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-2.json
}

# weights-3 (weights) on node1: start stage -1, no devices
#   ports: none; log: logs/weights-3@node1.log
#   ready: it has ended with code 0
run_weights_3() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model Inferact/MiniMax-M3-EAGLE3-GQA \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-3.json
}

# weights-4 (weights) on node2: start stage -1, no devices
#   ports: none; log: logs/weights-4@node2.log
#   ready: it has ended with code 0
run_weights_4() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model nvidia/MiniMax-M3-NVFP4 \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-4.json
}

# weights-5 (weights) on node2: start stage -1, no devices
#   ports: none; log: logs/weights-5@node2.log
#   ready: it has ended with code 0
run_weights_5() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model Inferact/MiniMax-M3-EAGLE3-GQA \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-5.json
}

# weights-6 (weights) on node3: start stage -1, no devices
#   ports: none; log: logs/weights-6@node3.log
#   ready: it has ended with code 0
run_weights_6() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model nvidia/MiniMax-M3-NVFP4 \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-6.json
}

# weights-7 (weights) on node3: start stage -1, no devices
#   ports: none; log: logs/weights-7@node3.log
#   ready: it has ended with code 0
run_weights_7() {
  unset engine_key
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model Inferact/MiniMax-M3-EAGLE3-GQA \
    --record /run/pdserve/minimax-m3-gb300-store/weights/weights-7.json
}

# mooncake-master (mooncake-master) on node0: start stage 0, no devices
#   ports: rpc 5051, http 9003; log: logs/mooncake-master@node0.log
#   ready: http://127.0.0.1:9003/health answers 200
run_mooncake_master() {
  keep_only PATH HOME USER LOGNAME SHELL LANG LC_ALL LC_CTYPE TZ TMPDIR VIRTUAL_ENV PYTHONPATH \
    PYTHONNOUSERSITE LD_LIBRARY_PATH LD_PRELOAD
  unset engine_key
  export PYTHONUNBUFFERED=1
  exec python -m mooncake.cli -rpc_address=198.51.100.1 -rpc_port=5051 -metrics_host=127.0.0.1 -metrics_port=9003 -enable_metric_reporting=false -eviction_high_watermark_ratio=0.9 -default_kv_lease_ttl=10000 -rpc_thread_num=16
}

# prefill-0 (prefill) on node0: start stage 1, devices 0,1
#   ports: http 8100, nixl 5600; log: logs/prefill-0@node0.log
#   ready: http://198.51.100.1:8100/health answers 200
#   patches: multiconnector-prom-metrics, multiconnector-selection, stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0() {
  cat >"$RUN_DIR/mooncake-store-prefill-0.json" <<'END_OF_FILE'
{
  "metadata_server": "P2PHANDSHAKE",
  "master_server_address": "198.51.100.1:5051",
  "protocol": "rdma",
  "device_name": "mlx5_0,mlx5_1,mlx5_2,mlx5_3",
  "mode": "embedded",
  "global_segment_size": 214748364800,
  "local_buffer_size": 4294967296
}
END_OF_FILE
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0,1
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_MAX_RPC_PORT=15099
  export MC_MIN_RPC_PORT=15000
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export MOONCAKE_CONFIG_PATH=/run/pdserve/minimax-m3-gb300-store/mooncake-store-prefill-0.json
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PDSERVE_PATCHES=multiconnector-prom-metrics,multiconnector-selection,stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-gb300-store/patches/prefill-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve nvidia/MiniMax-M3-NVFP4 \
    --served-model-name minimax-m3 \
    --host 198.51.100.1 \
    --port 8100 \
    --tensor-parallel-size 2 \
    --kv-transfer-config '{"kv_connector": "MultiConnector", "kv_connector_module_path": "pdserve.connectors.multi", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}}, {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"load_async": true, "lookup_async": true, "save_decode_cache": false}}]}, "kv_load_failure_policy": "recompute"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enable-prefix-caching \
    --kv-cache-dtype fp8 \
    --block-size 128 \
    --trust-remote-code \
    --language-model-only \
    --no-enable-flashinfer-autotune \
    --reasoning-parser minimax_m3 \
    --tool-call-parser minimax_m3 \
    --enable-auto-tool-choice \
    --default-chat-template-kwargs '{"thinking_mode": "enabled"}' \
    --max-cudagraph-capture-size 512 \
    --max-num-batched-tokens 16384 \
    --stream-interval 20 \
    --gpu-memory-utilization 0.9 \
    --enable-cumem-allocator \
    --speculative-config '{"method": "eagle3", "model": "Inferact/MiniMax-M3-EAGLE3-GQA", "num_speculative_tokens": 3, "attention_backend": "FLASH_ATTN"}' \
    --attention-config '{"backend": "FLASHINFER", "use_trtllm_attention": true, "indexer_kv_dtype": "fp8"}'
}

# decode-0 (decode) on node1: start stage 1, devices 0,1
#   ports: http 8200, nixl 5600; log: logs/decode-0@node1.log
#   ready: http://198.51.100.2:8200/health answers 200
#   patches: multiconnector-prom-metrics, multiconnector-selection, stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0() {
  cat >"$RUN_DIR/mooncake-store-decode-0.json" <<'END_OF_FILE'
{
  "metadata_server": "P2PHANDSHAKE",
  "master_server_address": "198.51.100.1:5051",
  "protocol": "rdma",
  "device_name": "mlx5_0,mlx5_1,mlx5_2,mlx5_3",
  "mode": "embedded",
  "global_segment_size": 214748364800,
  "local_buffer_size": 4294967296
}
END_OF_FILE
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0,1
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_MAX_RPC_PORT=15099
  export MC_MIN_RPC_PORT=15000
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export MOONCAKE_CONFIG_PATH=/run/pdserve/minimax-m3-gb300-store/mooncake-store-decode-0.json
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PDSERVE_PATCHES=multiconnector-prom-metrics,multiconnector-selection,stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-gb300-store/patches/decode-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve nvidia/MiniMax-M3-NVFP4 \
    --served-model-name minimax-m3 \
    --host 198.51.100.2 \
    --port 8200 \
    --tensor-parallel-size 2 \
    --kv-transfer-config '{"kv_connector": "MultiConnector", "kv_connector_module_path": "pdserve.connectors.multi", "kv_role": "kv_consumer", "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}}, {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"load_async": true, "lookup_async": true, "save_decode_cache": false, "enable_lookup": false}}]}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enable-prefix-caching \
    --kv-cache-dtype fp8 \
    --block-size 128 \
    --trust-remote-code \
    --language-model-only \
    --no-enable-flashinfer-autotune \
    --reasoning-parser minimax_m3 \
    --tool-call-parser minimax_m3 \
    --enable-auto-tool-choice \
    --default-chat-template-kwargs '{"thinking_mode": "enabled"}' \
    --max-cudagraph-capture-size 512 \
    --max-num-batched-tokens 16384 \
    --stream-interval 20 \
    --gpu-memory-utilization 0.9 \
    --enable-cumem-allocator \
    --speculative-config '{"method": "eagle3", "model": "Inferact/MiniMax-M3-EAGLE3-GQA", "num_speculative_tokens": 3, "attention_backend": "FLASH_ATTN"}' \
    --attention-config '{"backend": "FLASHINFER", "use_trtllm_attention": true, "indexer_kv_dtype": "fp8", "minimax_m3_msa_decode_backend": "cutlass"}' \
    --max-num-seqs 1024
}

# decode-1 (decode) on node2: start stage 1, devices 0,1
#   ports: http 8200, nixl 5600; log: logs/decode-1@node2.log
#   ready: http://198.51.100.3:8200/health answers 200
#   patches: multiconnector-prom-metrics, multiconnector-selection, stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_1() {
  cat >"$RUN_DIR/mooncake-store-decode-1.json" <<'END_OF_FILE'
{
  "metadata_server": "P2PHANDSHAKE",
  "master_server_address": "198.51.100.1:5051",
  "protocol": "rdma",
  "device_name": "mlx5_0,mlx5_1,mlx5_2,mlx5_3",
  "mode": "embedded",
  "global_segment_size": 214748364800,
  "local_buffer_size": 4294967296
}
END_OF_FILE
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0,1
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_MAX_RPC_PORT=15099
  export MC_MIN_RPC_PORT=15000
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export MOONCAKE_CONFIG_PATH=/run/pdserve/minimax-m3-gb300-store/mooncake-store-decode-1.json
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PDSERVE_PATCHES=multiconnector-prom-metrics,multiconnector-selection,stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-gb300-store/patches/decode-1
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve nvidia/MiniMax-M3-NVFP4 \
    --served-model-name minimax-m3 \
    --host 198.51.100.3 \
    --port 8200 \
    --tensor-parallel-size 2 \
    --kv-transfer-config '{"kv_connector": "MultiConnector", "kv_connector_module_path": "pdserve.connectors.multi", "kv_role": "kv_consumer", "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}}, {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"load_async": true, "lookup_async": true, "save_decode_cache": false, "enable_lookup": false}}]}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enable-prefix-caching \
    --kv-cache-dtype fp8 \
    --block-size 128 \
    --trust-remote-code \
    --language-model-only \
    --no-enable-flashinfer-autotune \
    --reasoning-parser minimax_m3 \
    --tool-call-parser minimax_m3 \
    --enable-auto-tool-choice \
    --default-chat-template-kwargs '{"thinking_mode": "enabled"}' \
    --max-cudagraph-capture-size 512 \
    --max-num-batched-tokens 16384 \
    --stream-interval 20 \
    --gpu-memory-utilization 0.9 \
    --enable-cumem-allocator \
    --speculative-config '{"method": "eagle3", "model": "Inferact/MiniMax-M3-EAGLE3-GQA", "num_speculative_tokens": 3, "attention_backend": "FLASH_ATTN"}' \
    --attention-config '{"backend": "FLASHINFER", "use_trtllm_attention": true, "indexer_kv_dtype": "fp8", "minimax_m3_msa_decode_backend": "cutlass"}' \
    --max-num-seqs 1024
}

# decode-2 (decode) on node3: start stage 1, devices 0,1
#   ports: http 8200, nixl 5600; log: logs/decode-2@node3.log
#   ready: http://198.51.100.4:8200/health answers 200
#   patches: multiconnector-prom-metrics, multiconnector-selection, stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_2() {
  cat >"$RUN_DIR/mooncake-store-decode-2.json" <<'END_OF_FILE'
{
  "metadata_server": "P2PHANDSHAKE",
  "master_server_address": "198.51.100.1:5051",
  "protocol": "rdma",
  "device_name": "mlx5_0,mlx5_1,mlx5_2,mlx5_3",
  "mode": "embedded",
  "global_segment_size": 214748364800,
  "local_buffer_size": 4294967296
}
END_OF_FILE
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0,1
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export MC_ENABLE_DEST_DEVICE_AFFINITY=1
  export MC_MAX_RPC_PORT=15099
  export MC_MIN_RPC_PORT=15000
  export MC_STORE_CLIENT_METRIC=1
  export MC_STORE_CLIENT_METRIC_INTERVAL=5
  export MC_TE_METRIC=0
  export MOONCAKE_CONFIG_PATH=/run/pdserve/minimax-m3-gb300-store/mooncake-store-decode-2.json
  export NCCL_CUMEM_ENABLE=1
  export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3
  export NCCL_MNNVL_ENABLE=1
  export NCCL_NVLS_ENABLE=1
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export PDSERVE_PATCHES=multiconnector-prom-metrics,multiconnector-selection,stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/minimax-m3-gb300-store/patches/decode-2
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export UCX_CUDA_IPC_ENABLE_MNNVL=y
  export UCX_MEMTYPE_CACHE=n
  export UCX_RNDV_PIPELINE_ERROR_HANDLING=y
  export VLLM_ALLREDUCE_USE_SYMM_MEM=0
  export VLLM_ENGINE_READY_TIMEOUT_S=3600
  export VLLM_FLASHINFER_ALLREDUCE_BACKEND=mnnvl
  export VLLM_FLOAT32_MATMUL_PRECISION=high
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MOONCAKE_LOAD_RECV_THREADS=20
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_USE_NCCL_SYMM_MEM=0
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve nvidia/MiniMax-M3-NVFP4 \
    --served-model-name minimax-m3 \
    --host 198.51.100.4 \
    --port 8200 \
    --tensor-parallel-size 2 \
    --kv-transfer-config '{"kv_connector": "MultiConnector", "kv_connector_module_path": "pdserve.connectors.multi", "kv_role": "kv_consumer", "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}}, {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"load_async": true, "lookup_async": true, "save_decode_cache": false, "enable_lookup": false}}]}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --enable-prefix-caching \
    --kv-cache-dtype fp8 \
    --block-size 128 \
    --trust-remote-code \
    --language-model-only \
    --no-enable-flashinfer-autotune \
    --reasoning-parser minimax_m3 \
    --tool-call-parser minimax_m3 \
    --enable-auto-tool-choice \
    --default-chat-template-kwargs '{"thinking_mode": "enabled"}' \
    --max-cudagraph-capture-size 512 \
    --max-num-batched-tokens 16384 \
    --stream-interval 20 \
    --gpu-memory-utilization 0.9 \
    --enable-cumem-allocator \
    --speculative-config '{"method": "eagle3", "model": "Inferact/MiniMax-M3-EAGLE3-GQA", "num_speculative_tokens": 3, "attention_backend": "FLASH_ATTN"}' \
    --attention-config '{"backend": "FLASHINFER", "use_trtllm_attention": true, "indexer_kv_dtype": "fp8", "minimax_m3_msa_decode_backend": "cutlass"}' \
    --max-num-seqs 1024
}

# proxy (proxy) on node0: start stage 1, no devices
#   ports: http 8000; log: logs/proxy@node0.log
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
  "protocol": "nixl",
  "workers": [
    {
      "name": "prefill-0",
      "role": "prefill",
      "url": "http://198.51.100.1:8100",
      "bootstrap_url": null,
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
    },
    {
      "name": "decode-1",
      "role": "decode",
      "url": "http://198.51.100.3:8200",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-2",
      "role": "decode",
      "url": "http://198.51.100.4:8200",
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
    --config /run/pdserve/minimax-m3-gb300-store/proxy.json \
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
  weights-2) run_weights_2 ;;
  weights-3) run_weights_3 ;;
  weights-4) run_weights_4 ;;
  weights-5) run_weights_5 ;;
  weights-6) run_weights_6 ;;
  weights-7) run_weights_7 ;;
  mooncake-master) run_mooncake_master ;;
  prefill-0) run_prefill_0 ;;
  decode-0) run_decode_0 ;;
  decode-1) run_decode_1 ;;
  decode-2) run_decode_2 ;;
  proxy) run_proxy ;;
  @node0)
    trap stop_all EXIT
    finish weights-0 logs/weights-0@node0.log
    finish weights-1 logs/weights-1@node0.log
    await_all
    launch mooncake-master logs/mooncake-master@node0.log http://127.0.0.1:9003/health
    await_all
    launch prefill-0 logs/prefill-0@node0.log http://198.51.100.1:8100/health
    launch proxy logs/proxy@node0.log http://127.0.0.1:8000/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  @node1)
    trap stop_all EXIT
    finish weights-2 logs/weights-2@node1.log
    finish weights-3 logs/weights-3@node1.log
    await_all
    launch decode-0 logs/decode-0@node1.log http://198.51.100.2:8200/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  @node2)
    trap stop_all EXIT
    finish weights-4 logs/weights-4@node2.log
    finish weights-5 logs/weights-5@node2.log
    await_all
    launch decode-1 logs/decode-1@node2.log http://198.51.100.3:8200/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  @node3)
    trap stop_all EXIT
    finish weights-6 logs/weights-6@node3.log
    finish weights-7 logs/weights-7@node3.log
    await_all
    launch decode-2 logs/decode-2@node3.log http://198.51.100.4:8200/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  *)
    echo "usage: $0 NAME        one process, in the foreground" >&2
    echo "       $0 @NODE       all processes of a node, in order, until one ends or Ctrl-C" >&2
    echo "names: weights-0 weights-1 weights-2 weights-3 weights-4 weights-5 weights-6 weights-7 mooncake-master prefill-0 decode-0 decode-1 decode-2 proxy" >&2
    echo "nodes: @node0 @node1 @node2 @node3" >&2
    exit 2
    ;;
esac
