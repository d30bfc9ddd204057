# syntax=docker/dockerfile:1
# One image with both engines at the pins of patchset.toml, patched. docker/README.md has the stages, what was built and
# what was only checked; docker/build.sh builds it and labels it with its manifest.

# The index of both platforms, linux/amd64 and linux/arm64. A name without a digest is refused.
ARG BASE=nvidia/cuda:13.0.3-devel-ubuntu24.04@sha256:b7ae301dea2c162444795462ce17a05f6a516e5a75944b57af5b88540a1a2266

FROM ${BASE} AS base
ARG BASE
ENV VENV=/opt/venv ROOT=/opt/zero-mismatch CUDA_HOME=/usr/local/cuda PYTHONDONTWRITEBYTECODE=1
COPY patchset.toml /opt/zero-mismatch/
COPY docker/steps/lib.sh docker/steps/base.sh /opt/zero-mismatch/docker/steps/
RUN BASE="${BASE}" /opt/zero-mismatch/docker/steps/base.sh
ENV PATH=/opt/venv/bin:${PATH}

# Every package but the engines: made anew only when the lock changes.
FROM base AS deps
COPY apply.py /opt/zero-mismatch/
COPY patchset /opt/zero-mismatch/patchset
COPY Dockerfile /opt/zero-mismatch/
COPY docker/image_pins.py docker/requirements.lock /opt/zero-mismatch/docker/
COPY docker/steps/deps.sh /opt/zero-mismatch/docker/steps/
RUN --mount=type=cache,target=/root/.cache/pip /opt/zero-mismatch/docker/steps/deps.sh

# Compiled here: DeepEP against torch's own NVSHMEM, TransformerEngine against this torch.
FROM deps AS wheels
COPY docker/steps/wheels.sh /opt/zero-mismatch/docker/steps/
RUN --mount=type=cache,target=/root/.cache/zero-mismatch /opt/zero-mismatch/docker/steps/wheels.sh

FROM deps AS vllm
ARG VLLM_FROM=wheel
ARG MAX_JOBS=8
COPY patchset.lock /opt/zero-mismatch/
COPY patches /opt/zero-mismatch/patches
COPY overlays /opt/zero-mismatch/overlays
COPY docker/steps/vllm.sh /opt/zero-mismatch/docker/steps/
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=cache,target=/root/.cache/zero-mismatch \
    VLLM_FROM="${VLLM_FROM}" MAX_JOBS="${MAX_JOBS}" /opt/zero-mismatch/docker/steps/vllm.sh

FROM deps AS megatron
COPY --from=wheels /wheels /wheels
COPY --from=vllm /wheels /wheels
COPY patchset.lock /opt/zero-mismatch/
COPY patches /opt/zero-mismatch/patches
COPY overlays /opt/zero-mismatch/overlays
COPY docker/steps/engines.sh /opt/zero-mismatch/docker/steps/
RUN --mount=type=cache,target=/root/.cache/pip /opt/zero-mismatch/docker/steps/engines.sh

# The JIT compilers (DeepGEMM, TileLang, FlashInfer, Triton) need nvcc and a host compiler, so the base stays; what only
# the build needed (CMake, Rust, sources, caches) does not come along.
FROM base AS runtime
ARG BASE
ARG VLLM_FROM=wheel
ARG REVISION=
ENV BASE=${BASE} VLLM_FROM=${VLLM_FROM} REVISION=${REVISION}
COPY --from=megatron /opt/venv /opt/venv
COPY . /opt/zero-mismatch
RUN /opt/zero-mismatch/docker/steps/finish.sh \
    && useradd --uid 2000 --gid 0 --create-home rl \
    && mkdir -p /evidence && chown 2000:0 /evidence
USER 2000
WORKDIR /home/rl
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=20m --retries=3 \
    CMD ["python3", "/opt/zero-mismatch/docker/image_health.py"]
ENTRYPOINT ["/opt/zero-mismatch/docker/entrypoint.sh"]
CMD ["help"]
