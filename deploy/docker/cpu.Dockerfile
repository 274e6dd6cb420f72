# RayZero on CPUs: optimizer actors, CPU ranks, a Ray head. Build from the repository's root:
#   docker build -f deploy/docker/cpu.Dockerfile -t rayzero:cpu .
# TORCH_INDEX: where a torch without CUDA lies (the index that PyTorch's install page names for CPU); empty: the default.
FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=""
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY rayzero rayzero
RUN python -m venv /opt/rayzero && \
    /opt/rayzero/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[hf]'

FROM python:3.11-slim-bookworm
# wget: KubeRay before 1.6 calls it in its probes.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ray
COPY --from=build /opt/rayzero /opt/rayzero
ENV PATH=/opt/rayzero/bin:$PATH RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
USER ray
WORKDIR /home/ray
COPY --chown=ray deploy/recipe.yaml recipe.yaml
CMD ["rayzero", "doctor"]
