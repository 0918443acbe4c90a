# The workers: orchestrator, rollout, trainer, sandbox, and the `marlaas` command.
#   docker build -f images/worker.Dockerfile --build-arg ACCEL=gpu -t marlaas/worker:0.1.0 .
# An environment of your own with more packages: FROM this image, USER 0, `RUN uv pip install …`, COPY your code, USER 10001:10001.
# BASE: any image with Python 3.11 to 3.13 and its venv module, also for ACCEL=gpu: the CUDA libraries come as wheels.
ARG BASE=python:3.11-slim

FROM ${BASE} AS packages
# Two of the packages come as source only. (Debian's own python needs its headers as well.)
RUN command -v gcc > /dev/null \
 || { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev $(test ! -e /usr/bin/python3 || echo python3-dev); }
# cpu or gpu: which lock.
ARG ACCEL=cpu
# How pip and uv reach a package index, where the default does not do.
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_DEFAULT_INDEX
ARG SSL_CERT_FILE
COPY locks/${ACCEL}.txt /build/lock.txt
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=300 VIRTUAL_ENV=/opt/marlaas
# What only developers need goes again; our own code is found in a folder of its own, so that a change of it is a small layer.
RUN python3 -m venv /build/uv && /build/uv/bin/pip install --no-cache-dir --disable-pip-version-check --quiet uv==0.13.8 \
 && python3 -m venv --without-pip /opt/marlaas \
 && /build/uv/bin/uv pip sync --require-hashes /build/lock.txt \
 && /build/uv/bin/uv pip uninstall alembic execnet flask flask-cors hypothesis import-linter mypy pytest pytest-asyncio pytest-timeout pytest-xdist ruff sqlalchemy \
 && cp /build/uv/bin/uv /opt/marlaas/bin/ \
 && echo /opt/code > $(/opt/marlaas/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/marlaas.pth \
 && printf '#!/opt/marlaas/bin/python3\nimport sys\nfrom marlaas.cli import main\nsys.exit(main())\n' > /opt/marlaas/bin/marlaas \
 && chmod 755 /opt/marlaas/bin/marlaas

FROM ${BASE} AS code
COPY operator/marlaas_api /opt/code/marlaas_api
COPY workers /opt/code
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/code

FROM ${BASE}
ARG ACCEL=cpu
# vLLM's CPU kernels load libnuma; on a GPU, Triton compiles small launchers when it meets a new kernel.
RUN wanted=$(test "${ACCEL}" = gpu && echo "gcc libc6-dev" || { /sbin/ldconfig -p | grep -q libnuma.so.1 || echo libnuma1; }) \
 && if [ -n "$wanted" ]; then apt-get update -qq && apt-get install -y -qq --no-install-recommends $wanted && rm -rf /var/lib/apt/lists/*; fi
# A name for the user: libraries ask for it.
RUN echo 'marlaas:x:10001:10001::/scratch:/usr/sbin/nologin' >> /etc/passwd && echo 'marlaas:x:10001:' >> /etc/group
COPY --from=packages /opt/marlaas /opt/marlaas
COPY --from=code /opt/code /opt/code
# What a pod may write is mounted at /scratch and /tmp; everything that caches goes there.
ENV PATH=/opt/marlaas/bin:/usr/local/bin:/usr/bin:/bin VIRTUAL_ENV=/opt/marlaas PYTHONUNBUFFERED=1 \
    HOME=/scratch XDG_CACHE_HOME=/scratch/cache MARLAAS_CACHE=/scratch/cache/marlaas
WORKDIR /scratch
RUN chown 10001:10001 /scratch
USER 10001:10001
CMD ["python3", "-m", "marlaas_worker", "--help"]
