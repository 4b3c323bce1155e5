# An image for recipes with `platform: cpu`: vLLM, LMCache and Mooncake from the pinned lock, pdserve compiled.
#
#   docker build -f containers/cpu.Dockerfile -t pdserve-cpu .
FROM docker.io/library/python:3.11-slim-bookworm AS engines

# The four libraries are what Mooncake links to. The compilers are torch's, which compiles kernels when an engine
# starts, and mypyc's.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc g++ libcurl4 libibverbs1 librdmacm1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*

COPY requirements/cpu-stack.lock.txt /build/
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# torch first, from its own index: the ordinary build brings gigabytes of CUDA.
RUN torch=$(sed -n 's/^torch==//p' /build/cpu-stack.lock.txt) \
 && pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "torch==$torch+cpu" \
 && pip install --no-cache-dir --no-deps -r /build/cpu-stack.lock.txt

FROM engines
COPY pyproject.toml hatch_build.py README.md LICENSE /build/
COPY pdserve /build/pdserve
# The lock is that of the engines: it has most of what pdserve imports, and nothing of it may change.
RUN PDSERVE_COMPILE=1 pip install --no-cache-dir -c /build/cpu-stack.lock.txt /build && rm -rf /build

RUN python -m pdserve.installed.image_check cpu
ENTRYPOINT ["pdserve"]
