# Pin what you build on: --build-arg BASE=docker.io/library/python@sha256:... A digest written here would be one of another
# day, and of one platform only.
ARG BASE=docker.io/library/python:3.12-slim

FROM ${BASE} AS build
WORKDIR /src
COPY .ci/build.txt .ci/runtime.txt ./.ci/
RUN python -m venv /opt/llmproxy \
    && /opt/llmproxy/bin/pip install --no-cache-dir --require-hashes -r .ci/runtime.txt \
    && pip install --no-cache-dir --require-hashes -r .ci/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY llmproxy ./llmproxy
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/llmproxy/bin/pip install --no-cache-dir --no-deps --no-index /dist/*.whl \
    && /opt/llmproxy/bin/pip uninstall --yes pip

FROM ${BASE}
COPY --from=build /opt/llmproxy /opt/llmproxy
# Nothing is written, so that the root file system may be read-only; the bytecode was compiled above.
ENV PATH=/opt/llmproxy/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A number, which orchestrators can tell from root; it needs no name, home or shell.
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["llmproxy"]
CMD ["serve"]
