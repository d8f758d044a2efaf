"""Runs of ``fairseq-finetune`` end."""

from __future__ import annotations

import pytest

from fairseq.errors import UserError
from fairseq_cli import finetune


def test_a_run_without_a_limit_is_refused() -> None:
    with pytest.raises(UserError, match="--train-flags --max-epoch 0: the run would never end"):
        finetune._check_end(0, 0)
    finetune._check_end(3, 0)
    finetune._check_end(0, 3)
