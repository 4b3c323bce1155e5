#!/usr/bin/env bash
# deepseek-r1-wide-ep: disaggregated, cuda, 37 processes on 4 node(s).
# Rendered from the plan; `pdserve up` runs the same commands, and watches, proves and restarts them too.
# warning: the recipe deepseek-r1-wide-ep is untested on the hardware that it names
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

RUN_DIR=/run/pdserve/deepseek-r1-wide-ep
# All processes of a deployment share it: on several nodes export the same one everywhere.
export engine_key="${engine_key:-$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')}"
mkdir -p "$RUN_DIR/logs"

# weights-0 (weights) on node0: start stage -1, no devices
#   ports: none; log: logs/weights-0@node0.log
#   ready: it has ended with code 0
run_weights_0() {
  unset engine_key
  export GLOO_SOCKET_IFNAME=eth0
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model deepseek-ai/DeepSeek-R1-0528 \
    --record /run/pdserve/deepseek-r1-wide-ep/weights/weights-0.json
}

# weights-1 (weights) on node1: start stage -1, no devices
#   ports: none; log: logs/weights-1@node1.log
#   ready: it has ended with code 0
run_weights_1() {
  unset engine_key
  export GLOO_SOCKET_IFNAME=eth0
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model deepseek-ai/DeepSeek-R1-0528 \
    --record /run/pdserve/deepseek-r1-wide-ep/weights/weights-1.json
}

# weights-2 (weights) on node2: start stage -1, no devices
#   ports: none; log: logs/weights-2@node2.log
#   ready: it has ended with code 0
run_weights_2() {
  unset engine_key
  export GLOO_SOCKET_IFNAME=eth0
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model deepseek-ai/DeepSeek-R1-0528 \
    --record /run/pdserve/deepseek-r1-wide-ep/weights/weights-2.json
}

# weights-3 (weights) on node3: start stage -1, no devices
#   ports: none; log: logs/weights-3@node3.log
#   ready: it has ended with code 0
run_weights_3() {
  unset engine_key
  export GLOO_SOCKET_IFNAME=eth0
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  exec python -m pdserve.weights \
    --model deepseek-ai/DeepSeek-R1-0528 \
    --record /run/pdserve/deepseek-r1-wide-ep/weights/weights-3.json
}

# prefill-0 (prefill) on node0: start stage 1, devices 0
#   ports: http 8100, nixl 5600, dp_master 29500; log: logs/prefill-0@node0.log
#   ready: http://198.51.100.1:8100/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8100 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 0 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank1 (prefill) on node0: start stage 1, devices 1
#   ports: http 8101, nixl 5601; log: logs/prefill-0-rank1@node0.log
#   ready: http://198.51.100.1:8101/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank1() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=1
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank1
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8101 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 1 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank2 (prefill) on node0: start stage 1, devices 2
#   ports: http 8102, nixl 5602; log: logs/prefill-0-rank2@node0.log
#   ready: http://198.51.100.1:8102/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank2() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=2
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank2
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8102 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 2 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank3 (prefill) on node0: start stage 1, devices 3
#   ports: http 8103, nixl 5603; log: logs/prefill-0-rank3@node0.log
#   ready: http://198.51.100.1:8103/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank3() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=3
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank3
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8103 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 3 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank4 (prefill) on node0: start stage 1, devices 4
#   ports: http 8104, nixl 5604; log: logs/prefill-0-rank4@node0.log
#   ready: http://198.51.100.1:8104/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank4() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=4
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank4
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8104 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 4 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank5 (prefill) on node0: start stage 1, devices 5
#   ports: http 8105, nixl 5605; log: logs/prefill-0-rank5@node0.log
#   ready: http://198.51.100.1:8105/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank5() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=5
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank5
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8105 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 5 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank6 (prefill) on node0: start stage 1, devices 6
#   ports: http 8106, nixl 5606; log: logs/prefill-0-rank6@node0.log
#   ready: http://198.51.100.1:8106/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank6() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=6
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank6
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8106 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 6 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank7 (prefill) on node0: start stage 1, devices 7
#   ports: http 8107, nixl 5607; log: logs/prefill-0-rank7@node0.log
#   ready: http://198.51.100.1:8107/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank7() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=7
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank7
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.1
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.1
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.1 \
    --port 8107 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 7 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank8 (prefill) on node1: start stage 1, devices 0
#   ports: http 8100, nixl 5600; log: logs/prefill-0-rank8@node1.log
#   ready: http://198.51.100.2:8100/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank8() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank8
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8100 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 8 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank9 (prefill) on node1: start stage 1, devices 1
#   ports: http 8101, nixl 5601; log: logs/prefill-0-rank9@node1.log
#   ready: http://198.51.100.2:8101/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank9() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=1
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank9
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8101 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 9 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank10 (prefill) on node1: start stage 1, devices 2
#   ports: http 8102, nixl 5602; log: logs/prefill-0-rank10@node1.log
#   ready: http://198.51.100.2:8102/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank10() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=2
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank10
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8102 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 10 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank11 (prefill) on node1: start stage 1, devices 3
#   ports: http 8103, nixl 5603; log: logs/prefill-0-rank11@node1.log
#   ready: http://198.51.100.2:8103/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank11() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=3
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank11
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8103 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 11 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank12 (prefill) on node1: start stage 1, devices 4
#   ports: http 8104, nixl 5604; log: logs/prefill-0-rank12@node1.log
#   ready: http://198.51.100.2:8104/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank12() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=4
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank12
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8104 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 12 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank13 (prefill) on node1: start stage 1, devices 5
#   ports: http 8105, nixl 5605; log: logs/prefill-0-rank13@node1.log
#   ready: http://198.51.100.2:8105/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank13() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=5
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank13
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8105 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 13 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank14 (prefill) on node1: start stage 1, devices 6
#   ports: http 8106, nixl 5606; log: logs/prefill-0-rank14@node1.log
#   ready: http://198.51.100.2:8106/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank14() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=6
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank14
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8106 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 14 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# prefill-0-rank15 (prefill) on node1: start stage 1, devices 7
#   ports: http 8107, nixl 5607; log: logs/prefill-0-rank15@node1.log
#   ready: http://198.51.100.2:8107/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_prefill_0_rank15() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=7
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/prefill-0-rank15
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.2
  export VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.2
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.2 \
    --port 8107 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 15 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.1 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --gpu-memory-utilization 0.8 \
    --all2all-backend deepep_high_throughput
}

# decode-0 (decode) on node2: start stage 1, devices 0
#   ports: http 8200, nixl 5600, dp_master 29500; log: logs/decode-0@node2.log
#   ready: http://198.51.100.3:8200/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8200 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 0 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank1 (decode) on node2: start stage 1, devices 1
#   ports: http 8201, nixl 5601; log: logs/decode-0-rank1@node2.log
#   ready: http://198.51.100.3:8201/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank1() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=1
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank1
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8201 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 1 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank2 (decode) on node2: start stage 1, devices 2
#   ports: http 8202, nixl 5602; log: logs/decode-0-rank2@node2.log
#   ready: http://198.51.100.3:8202/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank2() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=2
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank2
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8202 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 2 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank3 (decode) on node2: start stage 1, devices 3
#   ports: http 8203, nixl 5603; log: logs/decode-0-rank3@node2.log
#   ready: http://198.51.100.3:8203/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank3() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=3
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank3
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8203 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 3 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank4 (decode) on node2: start stage 1, devices 4
#   ports: http 8204, nixl 5604; log: logs/decode-0-rank4@node2.log
#   ready: http://198.51.100.3:8204/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank4() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=4
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank4
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8204 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 4 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank5 (decode) on node2: start stage 1, devices 5
#   ports: http 8205, nixl 5605; log: logs/decode-0-rank5@node2.log
#   ready: http://198.51.100.3:8205/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank5() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=5
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank5
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8205 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 5 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank6 (decode) on node2: start stage 1, devices 6
#   ports: http 8206, nixl 5606; log: logs/decode-0-rank6@node2.log
#   ready: http://198.51.100.3:8206/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank6() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=6
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank6
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8206 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 6 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank7 (decode) on node2: start stage 1, devices 7
#   ports: http 8207, nixl 5607; log: logs/decode-0-rank7@node2.log
#   ready: http://198.51.100.3:8207/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank7() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=7
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank7
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.3
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.3
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5600
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.3 \
    --port 8207 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 7 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank8 (decode) on node3: start stage 1, devices 0
#   ports: http 8200, nixl 5600; log: logs/decode-0-rank8@node3.log
#   ready: http://198.51.100.4:8200/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank8() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=0
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank8
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8200 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 8 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank9 (decode) on node3: start stage 1, devices 1
#   ports: http 8201, nixl 5601; log: logs/decode-0-rank9@node3.log
#   ready: http://198.51.100.4:8201/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank9() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=1
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank9
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8201 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 9 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank10 (decode) on node3: start stage 1, devices 2
#   ports: http 8202, nixl 5602; log: logs/decode-0-rank10@node3.log
#   ready: http://198.51.100.4:8202/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank10() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=2
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank10
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8202 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 10 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank11 (decode) on node3: start stage 1, devices 3
#   ports: http 8203, nixl 5603; log: logs/decode-0-rank11@node3.log
#   ready: http://198.51.100.4:8203/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank11() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=3
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank11
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8203 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 11 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank12 (decode) on node3: start stage 1, devices 4
#   ports: http 8204, nixl 5604; log: logs/decode-0-rank12@node3.log
#   ready: http://198.51.100.4:8204/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank12() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=4
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank12
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8204 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 12 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank13 (decode) on node3: start stage 1, devices 5
#   ports: http 8205, nixl 5605; log: logs/decode-0-rank13@node3.log
#   ready: http://198.51.100.4:8205/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank13() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=5
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank13
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8205 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 13 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank14 (decode) on node3: start stage 1, devices 6
#   ports: http 8206, nixl 5606; log: logs/decode-0-rank14@node3.log
#   ready: http://198.51.100.4:8206/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank14() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=6
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank14
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8206 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 14 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
}

# decode-0-rank15 (decode) on node3: start stage 1, devices 7
#   ports: http 8207, nixl 5607; log: logs/decode-0-rank15@node3.log
#   ready: http://198.51.100.4:8207/health answers 200
#   patches: stale-completions, failed-loads-stand-back, nixl-abandoned-kv
run_decode_0_rank15() {
  VLLM_API_KEY="${engine_key:?}"
  unset VLLM_PORT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE RANK \
    LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT VLLM_SERVER_DEV_MODE VLLM_PLUGINS \
    LMCACHE_USE_UPSTREAM_MP LMCACHE_MP_TRANSFER_MODE MC_LEGACY_RPC_PORT_BINDING GPU_DEVICE_ORDINAL \
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
  unset engine_key
  export CUDA_VISIBLE_DEVICES=7
  export GLOO_SOCKET_IFNAME=eth0
  export LMCACHE_DISABLE_BANNER=1
  export LMCACHE_TRACK_USAGE=false
  export NCCL_SOCKET_IFNAME=eth0
  export NO_PROXY=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export NVIDIA_GDRCOPY=enabled
  export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0
  export NVSHMEM_IB_ENABLE_IBGDA=true
  export NVSHMEM_REMOTE_TRANSPORT=ibgda
  export NVSHMEM_SYMMETRIC_SIZE=16G
  export PDSERVE_PATCHES=stale-completions,failed-loads-stand-back,nixl-abandoned-kv
  export PDSERVE_PATCH_RECORD=/run/pdserve/deepseek-r1-wide-ep/patches/decode-0-rank15
  export PYTHONHASHSEED=0
  export PYTHONUNBUFFERED=1
  export TRITON_LIBCUDA_PATH=/usr/lib64
  export VLLM_ENGINE_READY_TIMEOUT_S=3000
  export VLLM_HOST_IP=198.51.100.4
  export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1
  export VLLM_NIXL_SIDE_CHANNEL_HOST=198.51.100.4
  export VLLM_NIXL_SIDE_CHANNEL_PORT=5592
  export VLLM_NO_USAGE_STATS=1
  export VLLM_RANDOMIZE_DP_DUMMY_INPUTS=1
  export VLLM_SKIP_P2P_CHECK=1
  export VLLM_USE_DEEP_GEMM=1
  export no_proxy=127.0.0.1,localhost,::1,198.51.100.1,198.51.100.2,198.51.100.3,198.51.100.4
  export VLLM_API_KEY
  exec python -m vllm.entrypoints.cli.main serve deepseek-ai/DeepSeek-R1-0528 \
    --served-model-name deepseek-r1 \
    --host 198.51.100.4 \
    --port 8207 \
    --tensor-parallel-size 1 \
    --data-parallel-size 16 \
    --data-parallel-rank 15 \
    --data-parallel-external-lb \
    --api-server-count 1 \
    --enable-expert-parallel \
    --distributed-executor-backend mp \
    --data-parallel-address 198.51.100.3 \
    --data-parallel-rpc-port 29500 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30}, "kv_load_failure_policy": "fail"}' \
    --enable-prompt-tokens-details \
    --disable-uvicorn-access-log \
    --moe-backend deep_gemm \
    --all2all-backend deepep_low_latency \
    --max-num-batched-tokens 256 \
    --max-num-seqs 256 \
    --enable-dbo \
    --dbo-decode-token-threshold 32
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
      "kind": "prefix_aware",
      "block_bytes": 256,
      "max_blocks": 65536,
      "min_match_ratio": 0.3
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
  "served_name": "deepseek-r1",
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
      "name": "prefill-0-rank1",
      "role": "prefill",
      "url": "http://198.51.100.1:8101",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank2",
      "role": "prefill",
      "url": "http://198.51.100.1:8102",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank3",
      "role": "prefill",
      "url": "http://198.51.100.1:8103",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank4",
      "role": "prefill",
      "url": "http://198.51.100.1:8104",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank5",
      "role": "prefill",
      "url": "http://198.51.100.1:8105",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank6",
      "role": "prefill",
      "url": "http://198.51.100.1:8106",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank7",
      "role": "prefill",
      "url": "http://198.51.100.1:8107",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank8",
      "role": "prefill",
      "url": "http://198.51.100.2:8100",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank9",
      "role": "prefill",
      "url": "http://198.51.100.2:8101",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank10",
      "role": "prefill",
      "url": "http://198.51.100.2:8102",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank11",
      "role": "prefill",
      "url": "http://198.51.100.2:8103",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank12",
      "role": "prefill",
      "url": "http://198.51.100.2:8104",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank13",
      "role": "prefill",
      "url": "http://198.51.100.2:8105",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank14",
      "role": "prefill",
      "url": "http://198.51.100.2:8106",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "prefill-0-rank15",
      "role": "prefill",
      "url": "http://198.51.100.2:8107",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0",
      "role": "decode",
      "url": "http://198.51.100.3:8200",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank1",
      "role": "decode",
      "url": "http://198.51.100.3:8201",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank2",
      "role": "decode",
      "url": "http://198.51.100.3:8202",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank3",
      "role": "decode",
      "url": "http://198.51.100.3:8203",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank4",
      "role": "decode",
      "url": "http://198.51.100.3:8204",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank5",
      "role": "decode",
      "url": "http://198.51.100.3:8205",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank6",
      "role": "decode",
      "url": "http://198.51.100.3:8206",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank7",
      "role": "decode",
      "url": "http://198.51.100.3:8207",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank8",
      "role": "decode",
      "url": "http://198.51.100.4:8200",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank9",
      "role": "decode",
      "url": "http://198.51.100.4:8201",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank10",
      "role": "decode",
      "url": "http://198.51.100.4:8202",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank11",
      "role": "decode",
      "url": "http://198.51.100.4:8203",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank12",
      "role": "decode",
      "url": "http://198.51.100.4:8204",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank13",
      "role": "decode",
      "url": "http://198.51.100.4:8205",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank14",
      "role": "decode",
      "url": "http://198.51.100.4:8206",
      "bootstrap_url": null,
      "ranks": 1,
      "kv_events_url": null,
      "kv_replay_url": null
    },
    {
      "name": "decode-0-rank15",
      "role": "decode",
      "url": "http://198.51.100.4:8207",
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
    --config /run/pdserve/deepseek-r1-wide-ep/proxy.json \
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
  prefill-0) run_prefill_0 ;;
  prefill-0-rank1) run_prefill_0_rank1 ;;
  prefill-0-rank2) run_prefill_0_rank2 ;;
  prefill-0-rank3) run_prefill_0_rank3 ;;
  prefill-0-rank4) run_prefill_0_rank4 ;;
  prefill-0-rank5) run_prefill_0_rank5 ;;
  prefill-0-rank6) run_prefill_0_rank6 ;;
  prefill-0-rank7) run_prefill_0_rank7 ;;
  prefill-0-rank8) run_prefill_0_rank8 ;;
  prefill-0-rank9) run_prefill_0_rank9 ;;
  prefill-0-rank10) run_prefill_0_rank10 ;;
  prefill-0-rank11) run_prefill_0_rank11 ;;
  prefill-0-rank12) run_prefill_0_rank12 ;;
  prefill-0-rank13) run_prefill_0_rank13 ;;
  prefill-0-rank14) run_prefill_0_rank14 ;;
  prefill-0-rank15) run_prefill_0_rank15 ;;
  decode-0) run_decode_0 ;;
  decode-0-rank1) run_decode_0_rank1 ;;
  decode-0-rank2) run_decode_0_rank2 ;;
  decode-0-rank3) run_decode_0_rank3 ;;
  decode-0-rank4) run_decode_0_rank4 ;;
  decode-0-rank5) run_decode_0_rank5 ;;
  decode-0-rank6) run_decode_0_rank6 ;;
  decode-0-rank7) run_decode_0_rank7 ;;
  decode-0-rank8) run_decode_0_rank8 ;;
  decode-0-rank9) run_decode_0_rank9 ;;
  decode-0-rank10) run_decode_0_rank10 ;;
  decode-0-rank11) run_decode_0_rank11 ;;
  decode-0-rank12) run_decode_0_rank12 ;;
  decode-0-rank13) run_decode_0_rank13 ;;
  decode-0-rank14) run_decode_0_rank14 ;;
  decode-0-rank15) run_decode_0_rank15 ;;
  proxy) run_proxy ;;
  @node0)
    trap stop_all EXIT
    finish weights-0 logs/weights-0@node0.log
    await_all
    launch prefill-0 logs/prefill-0@node0.log http://198.51.100.1:8100/health
    launch prefill-0-rank1 logs/prefill-0-rank1@node0.log http://198.51.100.1:8101/health
    launch prefill-0-rank2 logs/prefill-0-rank2@node0.log http://198.51.100.1:8102/health
    launch prefill-0-rank3 logs/prefill-0-rank3@node0.log http://198.51.100.1:8103/health
    launch prefill-0-rank4 logs/prefill-0-rank4@node0.log http://198.51.100.1:8104/health
    launch prefill-0-rank5 logs/prefill-0-rank5@node0.log http://198.51.100.1:8105/health
    launch prefill-0-rank6 logs/prefill-0-rank6@node0.log http://198.51.100.1:8106/health
    launch prefill-0-rank7 logs/prefill-0-rank7@node0.log http://198.51.100.1:8107/health
    launch proxy logs/proxy@node0.log http://127.0.0.1:8000/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  @node1)
    trap stop_all EXIT
    finish weights-1 logs/weights-1@node1.log
    await_all
    launch prefill-0-rank8 logs/prefill-0-rank8@node1.log http://198.51.100.2:8100/health
    launch prefill-0-rank9 logs/prefill-0-rank9@node1.log http://198.51.100.2:8101/health
    launch prefill-0-rank10 logs/prefill-0-rank10@node1.log http://198.51.100.2:8102/health
    launch prefill-0-rank11 logs/prefill-0-rank11@node1.log http://198.51.100.2:8103/health
    launch prefill-0-rank12 logs/prefill-0-rank12@node1.log http://198.51.100.2:8104/health
    launch prefill-0-rank13 logs/prefill-0-rank13@node1.log http://198.51.100.2:8105/health
    launch prefill-0-rank14 logs/prefill-0-rank14@node1.log http://198.51.100.2:8106/health
    launch prefill-0-rank15 logs/prefill-0-rank15@node1.log http://198.51.100.2:8107/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  @node2)
    trap stop_all EXIT
    finish weights-2 logs/weights-2@node2.log
    await_all
    launch decode-0 logs/decode-0@node2.log http://198.51.100.3:8200/health
    launch decode-0-rank1 logs/decode-0-rank1@node2.log http://198.51.100.3:8201/health
    launch decode-0-rank2 logs/decode-0-rank2@node2.log http://198.51.100.3:8202/health
    launch decode-0-rank3 logs/decode-0-rank3@node2.log http://198.51.100.3:8203/health
    launch decode-0-rank4 logs/decode-0-rank4@node2.log http://198.51.100.3:8204/health
    launch decode-0-rank5 logs/decode-0-rank5@node2.log http://198.51.100.3:8205/health
    launch decode-0-rank6 logs/decode-0-rank6@node2.log http://198.51.100.3:8206/health
    launch decode-0-rank7 logs/decode-0-rank7@node2.log http://198.51.100.3:8207/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  @node3)
    trap stop_all EXIT
    finish weights-3 logs/weights-3@node3.log
    await_all
    launch decode-0-rank8 logs/decode-0-rank8@node3.log http://198.51.100.4:8200/health
    launch decode-0-rank9 logs/decode-0-rank9@node3.log http://198.51.100.4:8201/health
    launch decode-0-rank10 logs/decode-0-rank10@node3.log http://198.51.100.4:8202/health
    launch decode-0-rank11 logs/decode-0-rank11@node3.log http://198.51.100.4:8203/health
    launch decode-0-rank12 logs/decode-0-rank12@node3.log http://198.51.100.4:8204/health
    launch decode-0-rank13 logs/decode-0-rank13@node3.log http://198.51.100.4:8205/health
    launch decode-0-rank14 logs/decode-0-rank14@node3.log http://198.51.100.4:8206/health
    launch decode-0-rank15 logs/decode-0-rank15@node3.log http://198.51.100.4:8207/health
    await_all
    echo "all processes of this node are up"
    wait -n
    ;;
  *)
    echo "usage: $0 NAME        one process, in the foreground" >&2
    echo "       $0 @NODE       all processes of a node, in order, until one ends or Ctrl-C" >&2
    echo "names: weights-0 weights-1 weights-2 weights-3 prefill-0 prefill-0-rank1 prefill-0-rank2 prefill-0-rank3 prefill-0-rank4 prefill-0-rank5 prefill-0-rank6 prefill-0-rank7 prefill-0-rank8 prefill-0-rank9 prefill-0-rank10 prefill-0-rank11 prefill-0-rank12 prefill-0-rank13 prefill-0-rank14 prefill-0-rank15 decode-0 decode-0-rank1 decode-0-rank2 decode-0-rank3 decode-0-rank4 decode-0-rank5 decode-0-rank6 decode-0-rank7 decode-0-rank8 decode-0-rank9 decode-0-rank10 decode-0-rank11 decode-0-rank12 decode-0-rank13 decode-0-rank14 decode-0-rank15 proxy" >&2
    echo "nodes: @node0 @node1 @node2 @node3" >&2
    exit 2
    ;;
esac
