# Ithaca with the versions that its tests ran with: docker build -t ithaca .
# torch's wheel brings CUDA's libraries; the host needs a driver and NVIDIA's container toolkit.
FROM python:3.12-slim

# Triton compiles a small launcher in C for each kernel
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /ithaca
COPY pyproject.toml constraints.txt README.md ./
RUN pip install --no-cache-dir -c constraints.txt hatchling
COPY ithaca ithaca
RUN pip install --no-cache-dir -c constraints.txt --no-build-isolation '.[parquet,tensorboard]'
COPY examples examples

# ithaca train on the GPUs of one node, or torchrun … -m -- ithaca train on several (docs/clusters.md)
CMD ["ithaca", "--help"]
