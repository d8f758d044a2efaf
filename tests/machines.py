"""Processors and compilers for which kernels of training are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fairseq.kernels import build as native
from fairseq.modules import dispatch

PARTS = ("attention", "cross_entropy", "dropout", "layers")
COMPILED = dispatch.compiled("dropout") is not None


# A processor without these instructions would run the same program twice.
HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@pytest.fixture(
    scope="module", params=["compiled", *(["compiled without AVX-512"] if HAS_AVX512 else []), "no compiler"]
)
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    """What this machine is taken for."""
    if request.param != "no compiler" and not COMPILED:
        pytest.skip("no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "no compiler":
            patch.setenv("CC", "false")
        elif "without" in request.param:
            patch.setenv("CFLAGS", "-mno-avx512f")  # nothing of AVX-512, bfloat16 included
        native.library.cache_clear()  # of all sources
        yield request.param
        for part in PARTS:
            assert (dispatch.compiled(part) is None) == (request.param == "no compiler")
    native.library.cache_clear()
