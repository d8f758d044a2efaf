"""Ctrl-C before a command has begun its work ends it quietly."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import runs

SLOW_TORCH = """
import os, signal, time
print("importing torch", flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(1e9)
"""


@pytest.mark.parametrize("command", [["train.py"], ["-m", "fairseq_cli.train"]], ids=["script", "module"])
def test_interruption_while_torch_is_imported_ends_with_130_and_no_traceback(tmp_path, command):
    (tmp_path / "torch.py").write_text(SLOW_TORCH)
    result = subprocess.run(
        [sys.executable, *command, "data"],
        cwd=runs.ROOT,
        env={**runs.environment(), "PYTHONPATH": f"{tmp_path}:{runs.ROOT}", "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "importing torch\n", "")


def test_importing_the_commands_leaves_the_importers_handlers_alone():
    code = "import signal, fairseq_cli; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True, env=runs.environment(), timeout=runs.TIMEOUT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
