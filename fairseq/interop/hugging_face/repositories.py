"""Models in repositories of the Hugging Face Hub, through huggingface_hub, which finds the user's
token itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fairseq.errors import UserError
from fairseq.interop.hugging_face.model_folder import CONFIG, INDEX, SAFE
from fairseq.text.tokenizers.base import import_package

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # ORG/NAME
# Neither code nor pickles, which other names of weights and vocabularies can be.
FILES = [
    *(CONFIG, "*.safetensors", INDEX),
    *("dict.txt", "tokenization.json"),  # of fairseq-export
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
]


def download(name: str, revision: str | None = None) -> Path:
    """Download the model in the repository *name* into the library's cache; return its folder.

    Raises:
        UserError: the library is missing or reports an error, or there are no safetensors.
    """
    library = _library(name)
    with _errors(f"{name}: no such folder here, and on the Hugging Face Hub"):
        # A `*` matches slashes, too: checkpoints in subfolders are other models.
        found = library.snapshot_download(name, revision=revision, allow_patterns=FILES, ignore_patterns=["*/*"])
    folder = Path(found)
    if not any((folder / each).exists() for each in (SAFE, INDEX)):
        raise UserError(f"{name}: has no {SAFE}; other formats are not downloaded, because they may hold code")
    return folder


def check_name(name: str) -> None:
    """Raise UserError unless *name* may be a repository's, and the library is installed."""
    if not REPOSITORY.fullmatch(name):
        raise UserError(f"`push` {name}: expected ORG/NAME, a repository on the Hugging Face Hub")
    _library(f"`push` {name}")


def upload(folder: Path, name: str, revisions: list[str]) -> str:
    """Upload *folder* to the repository *name*, which is made, private, if there is none; its
    subfolders *revisions* become branches. Return the address of the repository."""
    api = _library(f"`push` {name}").HfApi()
    with _errors(f"`push` {name}"):
        address = api.create_repo(name, private=True, exist_ok=True)
        left_out = [f"{revision}/*" for revision in revisions]
        api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=left_out)
        for revision in revisions:
            api.create_branch(name, branch=revision, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder / revision, revision=revision)
    return str(address)


def _library(where: str) -> ModuleType:
    return import_package(
        "huggingface_hub", f"{where}: huggingface_hub is not installed (extra hub); pip install huggingface_hub"
    )


@contextmanager
def _errors(where: str) -> Iterator[None]:
    """Turn errors of the library into one line."""
    try:
        yield
    # No access, no repository, no network: the library's, and those of what sends its requests.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{where}: {reason}; check name, access (hf auth login) and network") from None
