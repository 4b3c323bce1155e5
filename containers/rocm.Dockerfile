# An image for recipes with `platform: rocm`: vLLM's own image, an LMCache whose kernels are built for HIP, a Mooncake
# that can copy device memory, and pdserve compiled.
#
#   docker build -f containers/rocm.Dockerfile -t pdserve-rocm .
ARG VLLM=v0.31.0
FROM docker.io/vllm/vllm-openai-rocm:${VLLM}

# PyPI's wheel of LMCache has CUDA kernels only; it would fall back to a slow copy that may be wrong. It is compiled
# against the image's torch, for MI300X and MI325X (gfx942), MI350X and MI355X (gfx950).
ARG LMCACHE=v0.5.6
ARG PYTORCH_ROCM_ARCH=gfx942;gfx950
RUN python3 -m pip freeze | grep -iE '^(torch|torchvision|torchaudio|vllm|numpy|transformers)[ =]' >/tmp/keep.txt \
 && BUILD_WITH_HIP=1 CXX=hipcc PYTORCH_ROCM_ARCH="${PYTORCH_ROCM_ARCH}" \
    python3 -m pip install --no-cache-dir --no-deps --no-build-isolation \
    "lmcache @ git+https://github.com/LMCache/LMCache@${LMCACHE}"

# The wheel for ROCm: the one without CUDA (-non-cuda) reads host memory only, and its TCP cannot copy KV either.
ARG MOONCAKE=0.3.13.post1
RUN python3 -m pip install --no-cache-dir -c /tmp/keep.txt "mooncake-transfer-engine-rocm==${MOONCAKE}"

# What LMCache imports, and no other torch with it.
RUN python3 -m pip install --no-cache-dir -c /tmp/keep.txt sortedcontainers==2.4.0 \
    opentelemetry-exporter-prometheus==0.61b0 cupy-rocm-7-0==14.1.1 \
 && rm /tmp/keep.txt

COPY pyproject.toml hatch_build.py README.md LICENSE /build/
COPY pdserve /build/pdserve
RUN PDSERVE_COMPILE=1 python3 -m pip install --no-cache-dir /build && rm -rf /build

# By the files alone: a machine that builds images has no device, without which the engines cannot be imported.
RUN python3 -m pdserve.installed.image_check rocm
ENTRYPOINT ["pdserve"]
