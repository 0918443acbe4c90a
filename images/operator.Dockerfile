# The operator: Python, the packages of locks/operator.txt, marlaas_api and marlaas_operator without their fakes. No torch.
#   docker build -f images/operator.Dockerfile -t marlaas/operator:0.1.0 .
# BASE: any image with Python 3.11 to 3.13 and its venv module; the same one for building and for running.
ARG BASE=python:3.11-slim

# Bytecode that is checked by content: the root file system is read-only, and time stamps do not survive every build.
# Our own code is found in a folder of its own, so that a change of it is a small layer.
FROM ${BASE} AS packages
# How pip reaches a package index, where the default does not do.
ARG PIP_INDEX_URL
ARG PIP_CERT
COPY locks/operator.txt /build/
RUN python3 -m venv /opt/marlaas \
 && /opt/marlaas/bin/python3 -m pip install --no-cache-dir --disable-pip-version-check --no-compile --require-hashes --no-deps \
      -r /build/operator.txt \
 && /opt/marlaas/bin/python3 -m pip uninstall --quiet --yes --disable-pip-version-check setuptools pip \
 && site=$(/opt/marlaas/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && echo /opt/code > "$site/marlaas.pth" \
 && /opt/marlaas/bin/python3 -m compileall -q --invalidation-mode unchecked-hash "$site"

FROM ${BASE} AS code
COPY operator/marlaas_api /opt/code/marlaas_api
COPY operator/marlaas_operator /opt/code/marlaas_operator
# Fakes are for tests (tests/operator/test_image.py compares the list).
RUN cd /opt/code \
 && rm -r marlaas_api/bus_memory marlaas_api/blobs_memory.py marlaas_operator/cluster/memory.py marlaas_operator/cluster/ownership.py
RUN python3 -m compileall -q --invalidation-mode unchecked-hash /opt/code

FROM ${BASE}
# A name for the user: libraries ask for it.
RUN echo 'marlaas:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'marlaas:x:10001:' >> /etc/group
COPY --from=packages /opt/marlaas /opt/marlaas
COPY --from=code /opt/code /opt/code
ENV PATH=/opt/marlaas/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 10001:10001
CMD ["python3", "-m", "marlaas_operator"]
