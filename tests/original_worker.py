"""A process that calls scenarios with the original: ``python original_worker.py FOLDER``.

*FOLDER* has the source of fairseq 0.12.2. Its leaf modules are imported without the packages around
them, which need other packages. Calls and answers are pickled, each after its length.
"""

from __future__ import annotations

import importlib
import pickle
import struct
import sys
import types
from pathlib import Path
from typing import Any

CLASSES = {  # of packages, which are not run
    "fairseq.data": {
        "FairseqDataset": "fairseq_dataset",
        "FairseqIterableDataset": "fairseq_dataset",
        "BaseWrapperDataset": "base_wrapper_dataset",
        "Dictionary": "dictionary",
        "TokenBlockDataset": "token_block_dataset",
    },
    "fairseq.modules": {
        "gelu": "gelu",
        "gelu_accurate": "gelu",
        "LearnedPositionalEmbedding": "learned_positional_embedding",
        "SinusoidalPositionalEmbedding": "sinusoidal_positional_embedding",
    },
    "fairseq.logging": {},
    "fairseq.criterions": {},
}


def prepare(folder: Path) -> None:
    """Let modules of the original be imported one by one."""
    for name in ("fairseq", *CLASSES):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]

        def find(attribute: str, package: str = name) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            home = CLASSES.get(package, {}).get(attribute)
            if home is None:
                return importlib.import_module(f"{package}.{attribute}")
            return getattr(importlib.import_module(f"{package}.{home}"), attribute)

        package.__getattr__ = find  # type: ignore[method-assign]
        sys.modules[name] = package
    # Functions with the names of their modules, which would stand in their place.
    modules: Any = sys.modules["fairseq.modules"]
    for name in ("gelu_accurate", "gelu"):
        setattr(modules, name, modules.__getattr__(name))
    criterions: Any = sys.modules["fairseq.criterions"]
    criterions.FairseqCriterion, criterions.register_criterion = object, lambda *names, **options: lambda cls: cls
    metrics = importlib.import_module("fairseq.logging.metrics")
    sys.modules["fairseq.metrics"] = sys.modules["fairseq"].metrics = metrics  # type: ignore[attr-defined]
    dataclass, omegaconf = types.ModuleType("fairseq.dataclass"), types.ModuleType("omegaconf")
    dataclass.FairseqDataclass, omegaconf.II = object, str  # type: ignore[attr-defined]
    sys.modules |= {"fairseq.dataclass": dataclass, "omegaconf": omegaconf}


def main() -> None:
    prepare(Path(sys.argv[1]))
    import original_scenarios

    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what the original prints
    while head := source.read(8):
        name, arguments = pickle.loads(source.read(*struct.unpack("Q", head)))
        try:
            answer = getattr(original_scenarios, name)(*arguments)
        except Exception as error:
            answer = error
        content = pickle.dumps(("error", repr(answer)) if isinstance(answer, Exception) else ("value", answer))
        sink.write(struct.pack("Q", len(content)) + content)
        sink.flush()


if __name__ == "__main__":
    main()
