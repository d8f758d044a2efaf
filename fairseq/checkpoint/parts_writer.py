"""PyTorch's distributed checkpoint as :mod:`fairseq.checkpoint.parts` uses it: imported only where one is written."""

from __future__ import annotations

import json
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from fairseq.distributed.tensor_part import MANIFEST


class Planner(DefaultSavePlanner):
    """Writes :class:`~fairseq.distributed.tensor_part.TensorPart` values; copies of one part are written once."""

    def lookup_object(self, index: Any) -> Any:
        return self.state_dict[index.fqn].local.detach()


class Writer(FileSystemWriter):
    """PyTorch's files, and beside them a manifest in JSON, which reading needs no pickle for."""

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        # Called on one process, when all parts are written.
        tensors: dict[str, Any] = {
            name: {"dtype": str(tensor.properties.dtype).removeprefix("torch."), "shape": list(tensor.size)}
            for name, tensor in metadata.state_dict_metadata.items()
        }
        rows = {
            (name, tuple(chunk.offsets)): chunk.sizes[0]
            for name, tensor in metadata.state_dict_metadata.items()
            for chunk in tensor.chunks
        }
        for written in (item for each in results for item in each):
            name, offset, stored = written.index.fqn, written.index.offset, written.storage_data
            chunk = [offset[0], rows[name, tuple(offset)], stored.relative_path, stored.offset, stored.length]
            tensors[name].setdefault("chunks", []).append(chunk)
        with self.fs.create_stream(self.fs.concat_path(self.path, MANIFEST), "wb") as file:
            file.write(json.dumps({"save_id": self.save_id, "tensors": tensors}).encode())
