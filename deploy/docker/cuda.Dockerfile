# RayZero on NVIDIA GPUs; torch's own wheel brings CUDA's libraries, the host its driver. From the repository's root:
#   docker build -f deploy/docker/cuda.Dockerfile -t rayzero:cuda .
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY rayzero rayzero
RUN python -m venv /opt/rayzero && /opt/rayzero/bin/pip install --no-cache-dir -c constraints.txt '.[hf]'

FROM python:3.11-slim-bookworm
# wget: KubeRay before 1.6 calls it in its probes.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ray
COPY --from=build /opt/rayzero /opt/rayzero
ENV PATH=/opt/rayzero/bin:$PATH RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER ray
WORKDIR /home/ray
COPY --chown=ray deploy/recipe.yaml recipe.yaml
CMD ["rayzero", "doctor"]
