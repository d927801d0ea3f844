FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY llmproxy ./llmproxy
RUN python -m venv /opt/llmproxy && /opt/llmproxy/bin/pip install --no-cache-dir .

FROM python:3.12-slim
COPY --from=build /opt/llmproxy /opt/llmproxy
ENV PATH=/opt/llmproxy/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --no-create-home --shell /usr/sbin/nologin llmproxy
USER llmproxy
EXPOSE 8080
# The process lives, also while no backend is ready: an orchestrator that restarted it then would only drop its queue.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('LLMPROXY_PORT', '8080') + '/health', timeout=2)"]
ENTRYPOINT ["llmproxy"]
CMD ["serve"]
