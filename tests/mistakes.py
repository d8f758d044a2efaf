"""The messages of a user's mistakes, and of the log, as commands show them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from fairseq.errors import UserError, with_flags


@contextlib.contextmanager
def user_error(match: str) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a ``UserError`` inside a ``with`` statement; what a command prints of it matches the
    pattern *match*."""
    with pytest.raises(UserError) as error:
        yield error
    assert re.search(match, error.value.with_flags), error.value.with_flags


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of the log as a command shows them."""
    return [with_flags(message) for message in caplog.messages]
