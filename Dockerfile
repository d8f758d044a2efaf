# The commands in an image; docs/installation.md has the commands that build and run it.
ARG BASE=python:3.12-slim

FROM ${BASE} AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${BASE}
# A compiler, for the decoding kernels.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# Layers from the rarely changed to the often changed: PyTorch, the other packages, this package.
WORKDIR /opt/fairseq-short
COPY constraints.txt pyproject.toml ./
# Wheels for CPUs; those for GPUs are several gigabytes larger and have another index.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN python -c "import torch" 2>/dev/null || \
    pip install --no-cache-dir -c constraints.txt torch --index-url "$TORCH_INDEX_URL"
ARG EXTRAS=plots,tensorboard,glue,tokenizers
RUN python -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *(d for e in sys.argv[1].split(',') if e for d in p['optional-dependencies'][e]), sep='\n')" "$EXTRAS" >requirements.txt && \
    pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY --from=wheel /dist /opt/dist
RUN pip install --no-cache-dir --no-deps /opt/dist/*.whl
# The recipes, to be copied to the working folder; they call fairseq's scripts.
COPY train.py preprocess.py eval_lm.py validate.py generate.py interactive.py ./
COPY examples examples
COPY scripts scripts

RUN useradd --create-home --non-unique --uid 1000 fairseq && mkdir /work && chown fairseq /work
# With --user there is no home folder; the cache of compiled kernels needs one that anybody can make.
ENV XDG_CACHE_HOME=/tmp/cache
USER fairseq
WORKDIR /work
CMD ["fairseq-train", "--help"]
