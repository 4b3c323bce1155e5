# An image for recipes with `platform: cuda`: vLLM's own image, which brings the engines, with LMCache and Mooncake of
# known versions and pdserve compiled.
#
#   docker build -f containers/cuda.Dockerfile -t pdserve-cuda .
ARG VLLM=v0.31.0
FROM docker.io/vllm/vllm-openai:${VLLM}

ARG LMCACHE=0.5.6
ARG MOONCAKE=0.3.14
# For the CUDA of the image's torch, which is 13 in vLLM's images from v0.26 on. The last step compares the two.
ARG MOONCAKE_WHEEL=mooncake-transfer-engine-cuda13
# One that the image brings goes first: all of these wheels have the same files.
# PyPI's wheel of LMCache has the CUDA kernels. vLLM's torch must stay the one it was built with, hence the constraint.
RUN python3 -m pip freeze | grep -iE '^(torch|torchvision|torchaudio|vllm|numpy|transformers)==' >/tmp/keep.txt \
 && python3 -m pip uninstall -y mooncake-transfer-engine "${MOONCAKE_WHEEL}" \
 && python3 -m pip install --no-cache-dir -c /tmp/keep.txt "lmcache==${LMCACHE}" "${MOONCAKE_WHEEL}==${MOONCAKE}" \
 && rm /tmp/keep.txt

COPY pyproject.toml hatch_build.py README.md LICENSE /build/
COPY pdserve /build/pdserve
RUN PDSERVE_COMPILE=1 python3 -m pip install --no-cache-dir /build && rm -rf /build

# By the files alone: a machine that builds images has no driver, without which the engines cannot be imported.
RUN python3 -m pdserve.installed.image_check cuda
ENTRYPOINT ["pdserve"]
