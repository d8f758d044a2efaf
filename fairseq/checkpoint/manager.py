"""The checkpoints of a run: where they are found, when they are saved, and which are kept.

Names are fairseq's. A run that begins locks its folder, finds what to go on from, saves at its
save points, and removes after each save what need not be kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.checkpoint import sharded
from fairseq.checkpoint.store import save
from fairseq.config.settings import CheckpointConfig
from fairseq.errors import UserError
from fairseq.system.files import atomic_file, atomic_folder, link_or_copy, make_folder, point_to, remove_leftovers
from fairseq.system.opening import read_named
from fairseq.text.tokenizers import TOKENIZATION, read_tokenization

logger = logging.getLogger(__name__)

LAST = "checkpoint_last.pt"
BEST = "checkpoint_best.pt"
NAMES = (BEST, "checkpoint.pt", LAST)  # in a folder, the first that exists is read
DICTIONARY = "dict.txt"
EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")
MILESTONE = re.compile(r"checkpoint_(words|tokens)_(\d+)\.pt")
BEST_OF_STAGE = re.compile(r"checkpoint_best(\d+)\.pt")
AMONG_BEST_OF = r"checkpoint\.best_%s_(-?\d+(?:\.\d+)?(?:e[+-]\d+)?)\.pt"
AMONG_BEST = re.compile(AMONG_BEST_OF % ".*")
# Of sharded training; the names above are links to it.
FOLDER = re.compile(r"checkpoint_\d+_\d+(-\d+)?\.parts")


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint at *path*, or the best or else the last one in the folder *path*;
    UserError without one."""
    path = Path(path)
    if not os.path.isdir(path) or sharded.is_folder(path):
        return path
    for name in NAMES:
        if os.path.exists(path / name):
            return path / name
    if os.path.exists(path / "config.json"):
        raise UserError(f"{path}: a model of transformers; fairseq-import makes a checkpoint of it")
    raise UserError(f"{path}: no checkpoint in this folder; expected {', '.join(NAMES)}")


def is_model(path: str | Path) -> bool:
    """Return whether *path* is a checkpoint,
    or a folder with one that :func:`find_checkpoint` finds."""
    path = Path(path)
    if os.path.isdir(path):
        return sharded.is_folder(path) or any(os.path.exists(path / name) for name in NAMES)
    return path.suffix == ".pt" and os.path.isfile(path)


def numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[float, Path]]:
    """The checkpoints of *folder* whose names match *pattern*,
    after the number in their names, the highest first."""
    names = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return sorted(((float(match[1]), path) for match, path in names), reverse=True)


@dataclass(frozen=True)
class SavePoint:
    """A point of a run at which it saves."""

    epoch: int  # from 1, as *updates*
    updates: int
    end_of_epoch: bool = False
    is_best: bool = False  # its validation figure is the best saved so far
    figure: float | None = None  # of the validation, None without one
    milestone: str | None = None  # name of the checkpoint that is due by words or tokens, if one is
    before_validation: bool = False  # to go on from with the validation, and nothing else


class CheckpointManager:
    """The checkpoints of one run; only the process of rank 0 has one. UserError if ``--save-dir``
    is not writable."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.config = config
        self.folder = Path(config.save_dir)
        if config.no_save:
            return
        self._is_new = not os.path.exists(self.folder)
        try:
            make_folder(self.folder)
            remove_leftovers(self.folder)
        except OSError as error:
            reason = f"cannot be made ({error.strerror}); choose another folder"
            raise UserError(f"`save_dir` {self.folder}: {reason}") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise UserError(f"`save_dir` {self.folder}: cannot be written to; choose another folder")

    # --- before the first update

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of ``--save-dir``; UserError
        if another run does. The kernel frees a killed run's.

        A folder that was made for a run that fails before it writes anything is removed.
        """
        if self.config.no_save:
            yield
            return
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            # flock, not a lock file: the kernel frees it, however the process ends. At once:
            # waiting would look like a hang.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            text = "another run writes checkpoints there; choose another folder"
            raise UserError(f"`save_dir` {self.folder}: {text}") from None
        except OSError:
            logger.warning("`save_dir` %s: the filesystem has no locks; no other run may write there", self.folder)
        try:
            yield
        except BaseException:
            if self._is_new:
                with contextlib.suppress(OSError):  # not empty
                    self.folder.rmdir()
            raise
        finally:
            os.close(descriptor)

    def restore_paths(self) -> list[Path]:
        """Return the checkpoints that training may start from, the first that can be read counts;
        none to start afresh.

        Raises:
            UserError: the named file is missing; or ``--restore-file`` is given beside
                ``--finetune-from-model``.
        """
        name = self.config.restore_file
        if name != LAST and self.config.finetune_from_model is not None:
            raise UserError(f"`finetune_from_model`: cannot be combined with `restore_file` {name}; give one of them")
        flag, last = "`restore_file`", self.folder / LAST
        if name == LAST:
            if os.path.lexists(last):
                # Then the others of the folder that are not another name of the last one.
                there = [path for path in self.folder.glob("checkpoint*.pt") if os.path.exists(path)]
                others = [path for path in there if not (os.path.exists(last) and path.samefile(last))]
                return [last, *sorted(others, key=lambda path: path.stat().st_mtime_ns, reverse=True)]
            if self.config.continue_once is None:
                return []
            flag, name = "`continue_once`", self.config.continue_once
        paths = (Path(name), self.folder / name)
        for path in paths:
            if os.path.exists(path):
                return [find_checkpoint(path)]
        missing = f"{flag} {name}: file not found; also looked in {self.folder}"
        if os.path.lexists(last):
            raise UserError(f"{missing}; leave it out to resume from {last}")
        # Jobs that are started again and again name the checkpoint that their first start does not
        # have yet. A link that leads nowhere is of a run.
        if Path(name).name != LAST or any(map(os.path.lexists, paths)):
            raise UserError(f"{missing}; leave it out to begin anew")
        logger.warning("%s; training begins anew", missing)
        return []

    def keep_dictionary(self, dictionary: str | Path) -> None:
        """Copy *dictionary* and the tokenizer next to it
        to the checkpoints, so that their folder is complete.

        Raises:
            UserError: a file cannot be read or written, or the tokenizer's is something else.
        """
        if self.config.no_save:
            return
        source = Path(dictionary)
        text = read_named(source, "make the data folder again")
        contents: dict[str, bytes | None] = {DICTIONARY: text, TOKENIZATION: None}
        # Read and recognised, not copied: a link in a data
        # folder could lead to any file of this user.
        if os.path.lexists(tokenization := source.with_name(TOKENIZATION)):
            contents[TOKENIZATION], _ = read_tokenization(tokenization)
        for name, content in contents.items():
            target = self.folder / name
            if os.path.isdir(target):
                raise UserError(f"{target}: cannot be written (Is a directory); remove it or choose another `save_dir`")
            if content is None:
                target.unlink(missing_ok=True)  # of another run
            elif not (target.is_file() and target.read_bytes() == content):
                with atomic_file(target, "`save_dir`") as file:
                    file.write(content)

    # --- saves

    def due(self, point: SavePoint) -> list[Path]:
        """Return the files that a save at *point* writes: the first is written, the others are
        links to it; none if nothing is saved."""
        config, epoch, updates = self.config, point.epoch, point.updates
        if config.no_save:
            return []
        if point.before_validation:
            return [] if config.no_last_checkpoints else [self.folder / LAST]
        # A checkpoint that was saved before its validation gives the name of the one that was due.
        if point.milestone and not MILESTONE.fullmatch(point.milestone):
            raise UserError(f"checkpoint: {point.milestone:.80} is no name of a milestone; use another checkpoint")
        # In fairseq's order.
        chosen = {
            f"checkpoint{epoch}.pt": point.end_of_epoch
            and not config.no_epoch_checkpoints
            and epoch % config.save_interval == 0,
            f"checkpoint_{epoch}_{updates}.pt": not point.end_of_epoch
            and config.save_interval_updates > 0
            and updates % config.save_interval_updates == 0,
            point.milestone or "": bool(point.milestone),
            BEST: point.is_best,
            self._ranked_name(point.figure or 0.0): point.figure is not None and self.is_among_best(point.figure),
            LAST: not config.no_last_checkpoints,
        }
        return [self.folder / name for name, selected in chosen.items() if selected]

    def save(self, state: Mapping[str, Any], paths: Sequence[Path]) -> None:
        """Write a checkpoint under all of *paths*, and remove those that need not be kept.

        The content is written once; further names are links to it, or copies where the filesystem
        has no links. Nothing is removed before all of it is on disk.

        Raises:
            UserError: a file cannot be written; the checkpoints saved before are untouched.
        """
        first, *others = paths
        for path in paths:
            if os.path.isdir(path) and not path.is_symlink():
                raise UserError(f"{path}: cannot be written (Is a directory); remove it or choose another `save_dir`")
        save(first, state)
        for path in others:
            link_or_copy(first, path)
        # After the new files, so that a kill between the two leaves a checkpoint too many, never
        # one too few.
        self._remove_old()

    @contextlib.contextmanager
    def saving_folder(self, paths: Sequence[Path], epoch: int, updates: int) -> Iterator[Path]:
        """A folder for the processes of a sharded run to write a checkpoint in; afterwards *paths*
        are links to it.

        After a UserError for a system error, the checkpoints saved before are untouched.
        """
        name = f"checkpoint_{epoch}_{updates}"
        numbers = itertools.count(2)
        folder = self.folder / f"{name}.parts"
        while os.path.exists(folder):  # of a run that went on from an earlier update
            folder = self.folder / f"{name}-{next(numbers)}.parts"
        with atomic_folder(folder) as temporary:
            yield temporary
        for path in paths:
            point_to(path, folder.name)
        self._remove_old()

    def save_as(self, name: str, state: Mapping[str, object]) -> Path:
        """Write *state* to the file *name*, which training
        neither resumes from nor removes; return its path."""
        save(self.folder / name, state)
        return self.folder / name

    # --- what is kept

    def _remove_old(self) -> None:
        """Remove of each kind what comes after the first so many: the newest, the best."""
        config, every = self.config, self.config.keep_interval_updates_pattern
        # --keep-interval-updates-pattern: multiples of it stay for good.
        updates = [(number, path) for number, path in numbered(self.folder, UPDATE) if every <= 0 or number % every]
        for files, keep in (
            (numbered(self.folder, EPOCH), config.keep_last_epochs),
            (updates, config.keep_interval_updates),
            (self._best_first(), config.keep_best_checkpoints),
        ):
            for _, path in files[keep:] if keep > 0 else []:
                path.unlink(missing_ok=True)
        # Names are links to folders: one that no name leads to any more is an old checkpoint.
        linked = {os.path.realpath(path) for path in self.folder.iterdir() if path.is_symlink()}
        for path in sorted(self.folder.iterdir()):
            if FOLDER.fullmatch(path.name) and os.path.realpath(path) not in linked:
                shutil.rmtree(path, ignore_errors=True)

    def set_best_aside(self, number: int | None = None) -> None:
        """Rename ``checkpoint_best.pt``, if there is one, after stage *number* (default: the next),
        which is over."""
        if not self.config.no_save and os.path.exists(self.folder / BEST):
            number = number or 1 + len(numbered(self.folder, BEST_OF_STAGE))
            os.replace(self.folder / BEST, self.folder / BEST.replace(".pt", f"{number}.pt"))

    def is_among_best(self, figure: float) -> bool:
        """Return whether a checkpoint with *figure*, if that is finite, is one of
        ``--keep-best-checkpoints``."""
        keep = self.config.keep_best_checkpoints
        if keep <= 0 or not math.isfinite(figure):
            return False
        before = [value for value, _ in self._best_first()[:keep]]
        if len(before) < keep:
            return True
        return figure > before[-1] if self.config.maximize_best_checkpoint_metric else figure < before[-1]

    def _ranked_name(self, figure: float) -> str:
        # Two figures that differ in six digits have two names, however small they are.
        text, six = f"{figure:.4f}", f"{figure:.6g}"
        return f"checkpoint.best_{self.config.best_checkpoint_metric}_{text if float(text) == float(six) else six}.pt"

    def _best_first(self) -> list[tuple[float, Path]]:
        # Figures of another metric are no better or worse.
        names = re.compile(AMONG_BEST_OF % re.escape(self.config.best_checkpoint_metric))
        highest_first = numbered(self.folder, names)
        return highest_first if self.config.maximize_best_checkpoint_metric else highest_first[::-1]
