"""The plug-ins of docs/plugins.md train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import runs
from mistakes import logged

from fairseq.system import plugins
from fairseq.training import hooks

CODE = re.findall(r"```python\n(.*?)```", (runs.ROOT / "docs" / "plugins.md").read_text(encoding="utf-8"), re.DOTALL)


TINY = """--arch transformer_lm --decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16
    --decoder-attention-heads 2"""
RUN = """--cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --max-tokens 64 --optimizer adam
    --lr 0.01 --max-update 6 --no-epoch-checkpoints --log-format json --log-interval 1"""
PARTS = {
    "focal_loss": f"{TINY} --criterion focal_loss --focal-gamma 1.5",
    "gru_lm": "--arch gru_lm_small --criterion cross_entropy",
    "rmsprop": f"{TINY} --criterion cross_entropy --optimizer rmsprop --rms-alpha 0.9",
}


@pytest.mark.parametrize("part", PARTS)
def test_the_code_of_the_documentation_trains(part: str, tmp_path: Path) -> None:
    (code,) = [block for block in CODE if f'("{part}"' in block]
    folder = tmp_path / f"documented_{part}"
    folder.mkdir()
    (folder / "__init__.py").write_text(code)
    plugins.import_user_module(str(folder))
    log = runs.train(tmp_path / "run", RUN, PARTS[part], "--user-dir", folder)
    assert {float(update["bsz"]) for update in runs.updates(log)} == {4.0}
    assert any("ppl" in update for update in runs.updates(log)) == (part != "focal_loss"), (
        "a focal loss has no perplexity"
    )
    losses = [float(update["loss"]) for update in runs.updates(log)]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_the_hook_of_the_documentation_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "_FACTORIES", [])
    caplog.set_level("INFO")
    (code,) = [block for block in CODE if "@register_hook" in block]
    folder = tmp_path / "documented_growth"
    folder.mkdir()
    (folder / "__init__.py").write_text(code.replace("1000.0", "1.0"))
    flags = [RUN, PARTS["focal_loss"].partition("--criterion")[0], "--criterion cross_entropy --user-dir", folder]
    assert len(runs.updates(runs.train(tmp_path / "run", flags))) == 1
    assert "a norm of 1.0 is reached after 1 update" in logged(caplog)


def test_the_hook_of_the_documentation_is_passed_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    (growth,) = [block for block in CODE if "@register_hook" in block]
    (code,) = [block for block in CODE if "train(settings" in block]
    flags = [str(runs.DATA), *f"{TINY} {RUN}".split()]
    given = re.sub(r"flags = \[.*\]", f"flags = {flags}", code)
    assert given != code
    exec(growth.replace("@register_hook\n", "").replace("1000.0", "1.0") + given, {})
    assert "a norm of 1.0 is reached after 1 update" in logged(caplog)
