"""Commands of the documentation that prepare data and train run as they are printed; training ends
after the first update."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from pydoc_data import topics

import pytest
import runs

from fairseq.training import loop
from fairseq_cli import preprocess, train

PROGRAMS = {"fairseq-preprocess": preprocess, "fairseq-train": train}
PAGES = ("README", "docs/first-model", "docs/data", "docs/training", "docs/resuming", "docs/methods")
BUILD_ON_DATA = ("docs/training", "docs/resuming", "docs/methods")  # of the quick start
# Models that need gigabytes, recipes of whole corpora, and what a `…` leaves out.
ELSEWHERE = re.compile(r"wikitext|wiki103|notes-bin|corpus/|…")


def printed(page: str) -> list[list[str]]:
    """The commands of *page*, in its order."""
    blocks = re.findall(
        r"^```bash\n(.*?)^```", (runs.ROOT / f"{page}.md").read_text(encoding="utf-8"), flags=re.M | re.S
    )
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines = [line for line in lines if line.split(" ")[0] in PROGRAMS and not ELSEWHERE.search(line)]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "limit_reached", lambda state, late: "one update" if state.num_updates else None)
    text = "\n\n".join(topics.topics.values())
    for name in ("train", "only", "novels", "news", "new"):
        Path(f"{name}.txt").write_text(text)
    for name in ("valid", "test"):
        Path(f"{name}.txt").write_text(text[:3000])
    commands = printed(page)
    if page in BUILD_ON_DATA:
        commands = printed("README")[:1] + commands
    for program, *words in commands:
        if "only.txt" in words:  # in place of the first command
            shutil.rmtree("data-bin")
        monkeypatch.setattr("sys.argv", [program, *words])
        PROGRAMS[program].cli_main()
        if program == "fairseq-train" and "--save-dir" in words:
            assert Path(words[words.index("--save-dir") + 1], "checkpoint_last.pt").exists()
    shutil.rmtree(tmp_path)
