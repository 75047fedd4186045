# An image that serves, in two stages: the first one builds the wheel with its native CPU kernels, the second has no compiler.
#
#   docker build -t headrace .                                                       for CPUs
#   docker build -t headrace:cuda --build-arg TORCH=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=[cuda,hf,media] .
#   docker run -p 8000:8000 -v ~/.cache/huggingface:/models headrace serve HUB-ID --host 0.0.0.0 --api-keys KEY
#
# Budget for CPUs, unpacked: 1,600 MiB. PyTorch takes 754 of them (2.13), our wheel and what it needs at most 268, which
# tests/test_wheel.py holds; the rest is for the base, the extras and pip's own.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY headrace headrace
COPY demo/model demo/model
COPY demo/models demo/models
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
ARG TORCH=https://download.pytorch.org/whl/cpu
ARG EXTRAS=[hf,media]
# PyTorch in a layer of its own: it changes seldom.
RUN pip install --no-cache-dir --index-url "$TORCH" "torch>=2.11"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    for wheel in /wheels/*.whl; do pip install --no-cache-dir "$wheel$EXTRAS"; done \
    && useradd --uid 10001 --create-home headrace \
    && mkdir /models && chown headrace /models
USER headrace
ENV HF_HOME=/models PYTHONUNBUFFERED=1
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["headrace"]
CMD ["serve", "--host", "0.0.0.0"]
