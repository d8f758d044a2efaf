# docker build -t fairseq-short .            (CPU; for a GPU: --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime)
# docker run --rm -v "$PWD:/work" fairseq-short fairseq-train data-bin …
ARG BASE=python:3.12-slim
FROM ${BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /opt/fairseq-short
# Index of CPU wheels of torch, which are smaller; empty: pip's default.
ARG TORCH_INDEX_URL=
ARG EXTRAS=plots,tensorboard,hub,glue,tokenizers
RUN python -c "import torch" 2>/dev/null || \
    pip install --no-cache-dir -c /opt/fairseq-short/constraints.txt torch ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
RUN pip install --no-cache-dir -c /opt/fairseq-short/constraints.txt "/opt/fairseq-short[${EXTRAS}]" && rm -rf /opt/fairseq-short
WORKDIR /work
CMD ["fairseq-train", "--help"]
