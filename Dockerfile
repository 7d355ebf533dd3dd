# An image for every command of this package, on hosts of the same kind:
#   docker build --target cpu -t torchtitan-rl:latest .    # or --target cuda
#   docker run --rm -v "$PWD/outputs:/outputs" torchtitan-rl:latest \
#       torchtitan-rl train alphabet_sort_tiny --output-dir /outputs
# CUDA's libraries come with torch and vLLM from PyPI; only the driver is the host's.

FROM debian:bookworm-slim AS base
# g++ and Python's headers: torch compiles kernels on first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 rl \
    && install --directory --owner=rl --group=rl /outputs
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 EXTRAS=smollm2,tasks,trackers
WORKDIR /opt/torchtitan-rl
# The packages are another layer than the code, which changes more often.
COPY pyproject.toml README.md LICENSE ./
COPY tools/setup.sh tools/
RUN mkdir torchtitan_rl && touch torchtitan_rl/__init__.py
# For `serve`, give -e HEALTH_URL=http://127.0.0.1:PORT/health. Other commands end when they fail.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m CMD ["python3", "-c", \
    "import os, urllib.request as u; u.urlopen(url) if (url := os.getenv('HEALTH_URL')) else None"]
CMD ["torchtitan-rl", "doctor"]

FROM base AS cuda
RUN bash tools/setup.sh /opt/venv cuda /opt/venv/.installed
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . .
WORKDIR /home/rl
USER 1000

FROM base AS cpu
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN TORCH_INDEX_URL=$TORCH_INDEX_URL bash tools/setup.sh /opt/venv cpu /opt/venv/.installed
COPY . .
WORKDIR /home/rl
USER 1000
