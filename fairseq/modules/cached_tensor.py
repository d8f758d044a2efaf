"""A cache for tensors computed by pure functions; bypassed inside compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., torch.Tensor])


def cached_tensor(count: int) -> Callable[[F], F]:
    """Decorator that caches the tensors of the last *count* different calls; callers must not modify them."""

    def decorate(function: F) -> F:
        remember = functools.lru_cache(maxsize=count)(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            # A graph computes the tensor where it is read; tracing a cache would tie it to what is in there.
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with torch.inference_mode(False):  # a later caller may need gradients
                return remember(*args, **kwargs)

        return cast(F, call)

    return decorate
