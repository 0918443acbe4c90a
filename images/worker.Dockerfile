# The workers: orchestrator, rollout, trainer, sandbox, and the `marlaas` command.
#   docker build -f images/worker.Dockerfile --build-arg ACCEL=gpu -t marlaas/worker:0.1.0 .
# An environment of your own with more packages: FROM this image, `RUN uv pip install …`, COPY your code, USER 10001.
# BASE: any image with Python 3.11 to 3.13 and its venv module, and for ACCEL=gpu nothing more: the CUDA libraries come as wheels.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# cpu or gpu: which lock.
ARG ACCEL=cpu
# How uv reaches a package index, where the default does not do.
ARG UV_DEFAULT_INDEX
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG SSL_CERT_FILE
COPY locks/${ACCEL}.txt /build/lock.txt
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=300 VIRTUAL_ENV=/opt/marlaas
RUN python3 -m venv /build/uv && /build/uv/bin/pip install --no-cache-dir --disable-pip-version-check --quiet uv==0.13.8 \
 && python3 -m venv --without-pip /opt/marlaas \
 && /build/uv/bin/uv pip sync --require-hashes /build/lock.txt \
 && cp /build/uv/bin/uv /opt/marlaas/bin/
COPY operator /build/operator
COPY workers /build/workers
RUN site=$(/opt/marlaas/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && cp -r /build/operator/marlaas_api /build/workers/marlaas /build/workers/marlaas_worker "$site" \
 && printf '#!/opt/marlaas/bin/python3\nimport sys\nfrom marlaas.cli import main\nsys.exit(main())\n' > /opt/marlaas/bin/marlaas \
 && chmod 755 /opt/marlaas/bin/marlaas \
 && /opt/marlaas/bin/python3 -m compileall -q --invalidation-mode unchecked-hash \
      "$site/marlaas_api" "$site/marlaas" "$site/marlaas_worker"

FROM ${BASE}
COPY --from=build /opt/marlaas /opt/marlaas
# What a pod may write is mounted at /scratch and /tmp; everything that caches goes there.
ENV PATH=/opt/marlaas/bin:/usr/local/bin:/usr/bin:/bin VIRTUAL_ENV=/opt/marlaas PYTHONUNBUFFERED=1 \
    HOME=/scratch XDG_CACHE_HOME=/scratch/cache MARLAAS_CACHE=/scratch/cache/marlaas
WORKDIR /scratch
RUN chown 10001:10001 /scratch
USER 10001:10001
CMD ["python3", "-m", "marlaas_worker", "--help"]
