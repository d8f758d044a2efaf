"""The source of fairseq 0.12.2 in a cache: ``python -m scripts.fairseq_original``.

The tests in ``tests/interop/test_original.py`` call it beside this package, as an oracle. Its
source distribution is downloaded from the package index that pip uses; nothing of it is installed
or built. Prints the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path

NAME = "fairseq-0.12.2"
SHA256 = "34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524"
INDEX = "https://pypi.org/simple"


def cache() -> Path:
    """The folder of the source, which need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FAIRSEQ_ORIGINAL") or Path(home, "fairseq-tests", NAME))


def index() -> str:
    """The package index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("PIP_INDEX_URL") or configured or INDEX


def download(folder: Path) -> None:
    """Put the source of fairseq into *folder*.

    Raises:
        SystemExit: the index has no such file, or another one of its name.
    """
    page = f"{index().rstrip('/')}/fairseq/"
    with urllib.request.urlopen(page) as answer:
        links = re.findall(r'href="([^"]+)"', answer.read().decode())
    link = next((link for link in links if f"{NAME}.tar.gz" in link), None)
    if link is None:
        raise SystemExit(f"{page}: no {NAME}.tar.gz; put the folder of its content at {folder}")
    with urllib.request.urlopen(urllib.parse.urljoin(page, link)) as answer:
        content = answer.read()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise SystemExit(f"{link}: SHA-256 {found}, expected {SHA256}; nothing was unpacked")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder.parent, filter="data")
    if folder.name != NAME:
        (folder.parent / NAME).rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not (cache() / "fairseq" / "version.txt").is_file():
        download(cache())
    print(cache())


if __name__ == "__main__":
    main()
