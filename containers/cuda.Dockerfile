# An image for recipes with `platform: cuda`: vLLM's own image, which brings the engines, with LMCache and Mooncake of
# known versions and pdserve compiled.
#
#   docker build -f containers/cuda.Dockerfile -t pdserve-cuda .
ARG VLLM=v0.31.0
FROM docker.io/vllm/vllm-openai:${VLLM}

ARG LMCACHE=0.5.6
ARG MOONCAKE=0.3.13.post1
# For a vLLM that was built with CUDA 13: --build-arg MOONCAKE_WHEEL=mooncake-transfer-engine-cuda13
ARG MOONCAKE_WHEEL=mooncake-transfer-engine
# PyPI's wheel of LMCache has the CUDA kernels. vLLM's torch must stay the one it was built with, hence the constraint.
RUN python3 -m pip freeze | grep -iE '^(torch|torchvision|torchaudio|vllm|numpy|transformers)==' >/tmp/keep.txt \
 && python3 -m pip install --no-cache-dir -c /tmp/keep.txt "lmcache==${LMCACHE}" "${MOONCAKE_WHEEL}==${MOONCAKE}" \
 && rm /tmp/keep.txt

COPY pyproject.toml hatch_build.py README.md LICENSE /build/
COPY pdserve /build/pdserve
RUN PDSERVE_COMPILE=1 python3 -m pip install --no-cache-dir /build && rm -rf /build

# By the files alone: a machine that builds images has no driver, without which the engines cannot be imported.
RUN python3 -m pdserve.installed.image_check cuda
ENTRYPOINT ["pdserve"]
