"""Machines for which kernels of training are tested."""

from machines import machine  # noqa: F401 - a fixture
