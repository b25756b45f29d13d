# syntax=docker/dockerfile:1
# Targets: cpu, cuda (the server; the last one is the default), demo (the example worker).
#
#   docker build --target cuda --build-arg REVISION=$(git rev-parse HEAD) -t ssmd:cuda .
#
# Every step is a script of deploy/container; `make container-check` runs this file in bare Debian roots, without Docker.
# The CUDA runtime is linked into the server, so both images stand on plain Debian: of the GPU's software only the driver's
# libraries are needed, and the NVIDIA container toolkit brings those from the node.
ARG DEBIAN=debian:12-slim

FROM ${DEBIAN} AS build-cpu
WORKDIR /src
COPY . .
RUN deploy/container/build.sh cpu /out

FROM ${DEBIAN} AS build-cuda
WORKDIR /src
COPY . .
RUN deploy/container/build.sh cuda /out

FROM ${DEBIAN} AS cpu
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ssmd" \
      org.opencontainers.image.description="The recurrent state of hybrid language models, as a service (CPU)" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="debian:12-slim"
RUN --mount=type=bind,from=build-cpu,source=/out,target=/mnt /mnt/runtime.sh /mnt
USER 65532:65532
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["healthcheck", "/healthz"]
ENTRYPOINT ["ssmd-server"]

FROM cpu AS demo
COPY --from=build-cpu /out/bin/ssmd-demo /usr/local/bin/ssmd-demo
COPY --from=build-cpu /out/share/ssmd/demo /usr/local/share/ssmd/demo
HEALTHCHECK NONE
ENTRYPOINT ["ssmd-demo", "--weights", "/usr/local/share/ssmd/demo/hybrid-kjv.safetensors", "--text", "/usr/local/share/ssmd/demo/heldout.txt"]

FROM ${DEBIAN} AS cuda
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ssmd" \
      org.opencontainers.image.description="The recurrent state of hybrid language models, as a service (CUDA)" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="debian:12-slim"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,from=build-cuda,source=/out,target=/mnt /mnt/runtime.sh /mnt
USER 65532:65532
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["healthcheck", "/healthz"]
ENTRYPOINT ["ssmd-server"]
