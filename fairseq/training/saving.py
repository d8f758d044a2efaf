"""Saving of a run: one file of the first process,
or a folder of parts; at once or in the background."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fairseq.checkpoint import CheckpointManager, sharded
from fairseq.checkpoint.manager import SavePoint
from fairseq.checkpoint.store import copied
from fairseq.config.settings import CheckpointConfig, DistributedConfig
from fairseq.distributed import World
from fairseq.distributed.sharding import is_sharded
from fairseq.distributed.world import FILES

logger = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of a run; every process has one, and the first one their *manager*.

    With ``--async-save`` a checkpoint is copied to the host, and written while training goes on;
    the next one, and the end of the run, wait for it.
    """

    def __init__(
        self, cfg: CheckpointConfig, distributed: DistributedConfig, world: World, manager: CheckpointManager | None
    ) -> None:
        self.cfg = cfg
        self.world = world
        self.manager = manager
        self.group: dist.ProcessGroup | None = None
        if is_sharded(distributed, world):
            # A group of its own: a thread's messages must not mix with training's.
            self.group = dist.new_group(backend="gloo", timeout=FILES)
        self.pending: Future[None] | None = None

    def save(self, state: dict[str, Any], point: SavePoint) -> None:
        """Write *state*, what a checkpoint holds, at *point*; to be called on every process.

        Raises:
            UserError: this checkpoint, or the one before in the background, cannot be written.
        """
        # One save at a time, so that memory holds one copy and files appear in order.
        self.wait()
        paths = self.manager.due(point) if self.manager is not None else []
        if self.cfg.no_save_optimizer_state:
            state = {key: value for key, value in state.items() if key != "last_optimizer_state"}
        work: Callable[[], None] | None = None
        if self.group is not None:
            work = self._parts(state, paths, self.group, point.epoch, point.updates, self.cfg.async_save)
        elif self.manager is not None and paths:
            work = functools.partial(self.manager.save, copied(state) if self.cfg.async_save else state, paths)
        if work is None:
            return

        def finish() -> None:
            work()
            for path in paths:
                logger.info("saved %s (epoch %d, update %d)", path, point.epoch, point.updates)

        if self.cfg.async_save:
            executor = ThreadPoolExecutor(1, "save")
            try:
                self.pending = executor.submit(finish)
            # No thread can be started.
            except RuntimeError:
                finish()
            executor.shutdown(wait=False)  # its thread ends with the work
        else:
            finish()

    def save_as(self, name: str, state: Mapping[str, object], epoch: int, updates: int) -> None:
        """Write *state* at once, on every process, as *name*,
        which training neither resumes from nor removes."""
        self.wait()
        if self.group is not None:
            paths = [self.manager.folder / name] if self.manager is not None else []
            work = self._parts(state, paths, self.group, epoch, updates)
            if work is not None:
                work()
        elif self.manager is not None:
            self.manager.save_as(name, state)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written;
        raise UserError if it cannot be written."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Complete, at the end of a run, the checkpoint that is being written; on every process.

        Raises:
            UserError: it cannot be written. After another error of the run, that is logged.
        """
        try:
            yield
        except BaseException:
            try:
                self.wait()
            except Exception as error:
                logger.error("%s", error)
            raise
        self.wait()
        self.world.barrier()

    def _parts(
        self,
        state: Mapping[str, object],
        paths: list[Path],
        group: dist.ProcessGroup,
        epoch: int,
        updates: int,
        copy: bool = False,
    ) -> Callable[[], None] | None:
        """What is left to do, on this process, to write the parts
        of *state*; None if no checkpoint is due."""
        plain, shards = sharded.split(state)
        open_folder = contextlib.ExitStack()
        folder = ""
        if self.manager is not None and paths:
            folder = str(open_folder.enter_context(self.manager.saving_folder(paths, epoch, updates)))
        # Also where no checkpoint is due: only the first process knows that.
        folder = self.world.share(folder)
        if not folder:
            return None
        if copy:
            shards = copied(shards)
            # Only the first process writes what is not sharded.
            plain = copied(plain) if self.world.is_first else {}

        def write() -> None:
            with open_folder:
                sharded.write(Path(folder), plain, shards, group)

        return write
