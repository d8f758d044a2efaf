"""Rendezvous: the key-value store through which the processes of a job find one another."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from fairseq.errors import UserError
from fairseq.system.files import prepare_file
from fairseq.system.opening import is_special

logger = logging.getLogger(__name__)

# In seconds: importing torch from a network file system may take minutes.
_SLOWEST_START = 300.0
_QUIET = 10.0  # seconds of waiting before a line in the log
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SOURCES = {"tcp": "`distributed_init_method` or `distributed_port`", "env": "MASTER_ADDR and MASTER_PORT"}


def listen(url: str | None, timeout: float) -> tuple[dist.Store, str]:
    """Open the store of a job at *url*, or at a free port of the loopback; returns it and its URL.

    torch's own store listens on every interface of the machine; where the URL names the loopback, this one does not.

    Raises:
        UserError: the address is in use, or not of this machine.
    """
    host, port = _address(url) if url else ("127.0.0.1", 0)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
        try:
            # A run may follow another at once, whose connections the kernel has not forgotten.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port) if host in _LOOPBACK else ("", port))
            bound.listen(1024)
            port = bound.getsockname()[1]
            limit = timedelta(seconds=timeout)
            store = dist.TCPStore(host, port, is_master=True, timeout=limit, master_listen_fd=bound.detach())
        except (OSError, OverflowError, RuntimeError) as error:
            raise UserError(_cannot_open(url, error)) from None
    return store, f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def is_reachable(url: str, timeout: float) -> bool:
    """Return whether the address of a store accepts connections; True where *url* is none."""
    if not url.startswith("tcp://"):
        return True
    with contextlib.suppress(OSError):
        socket.create_connection(_address(url), timeout).close()
        return True
    return False


def connect(url: str, rank: int, size: int, timeout: float) -> dist.Store:
    """Connect to the store at *url*: ``tcp://host:port``, ``file://path`` or ``env://``.

    Raises:
        UserError: there is no store at *url* within *timeout* seconds, or five minutes if that is longer.
    """
    limit = timedelta(seconds=max(timeout, _SLOWEST_START))
    try:
        if url.startswith("tcp://"):
            host, port = _address(url)
            store: dist.Store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        else:
            # torch would try to open the file until its time is over.
            if url.startswith("file://"):
                path = urlsplit(url).path
                if is_special(path):
                    raise UserError(f"`distributed_init_method` {url}: is a device or a pipe; give a file")
                prepare_file("`distributed_init_method`", path)
            store, _, _ = next(iter(dist.rendezvous(url, rank, size, timeout=limit)))
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        raise UserError(_cannot_open(url, error)) from None
    store.set_timeout(timedelta(seconds=timeout))
    attempt = _attempt() if url == "env://" else ""
    return dist.PrefixStore(attempt, store) if attempt else store


def _attempt() -> str:
    """A name of this start of the processes, where torchrun keeps one store for all starts (``--max-restarts``).

    Those started again would read addresses and failures of processes that were killed. Nodes count restarts each for
    itself, so that several have no common name.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return ""
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def hosts_store(url: str, rank: int) -> bool:
    """Return whether *rank* opens the store at *url*: rank 0 does, where the URL is an address."""
    return rank == 0 and url.startswith("tcp://")


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Wait until every process of the job has connected to *store*.

    Raises:
        UserError: some have not after *timeout* seconds, or five minutes if that is longer; the message names them.
    """
    timeout = max(timeout, _SLOWEST_START)
    store.set(f"joined/{rank}", socket.gethostname())
    missing = _missing(store, size, min(timeout, _QUIET))
    if missing:
        logger.info("rendezvous: waiting up to %g s for processes %s of %d", timeout, missing, size)
        missing = _missing(store, size, timeout)
    if missing:
        raise UserError(f"rendezvous: of {size} processes, {missing} did not join within {timeout:g} s")


def _missing(store: dist.Store, size: int, timeout: float) -> str:
    """Ranks that have not joined after *timeout* seconds, the first eight."""
    keys = [f"joined/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError:
        return ", ".join([str(rank) for rank, key in enumerate(keys) if not store.check([key])][:8])
    return ""


def stay_on_loopback(url: str) -> None:
    """Let gloo connect over the loopback where the rendezvous is there, unless the environment says otherwise."""
    # gloo would listen at the address of the host's name, which other machines may reach.
    if url.startswith("tcp://") and _address(url)[0] in _LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ:
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if names:
            os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not url.startswith("tcp://") or not host or port is None:
        raise UserError(f"`distributed_init_method` {url}: must be tcp://host:port, file://path or env://")
    return host, port


def _cannot_open(url: str | None, error: Exception) -> str:
    flag = _SOURCES.get(url.partition("://")[0], "`distributed_init_method`") if url else "`distributed_port`"
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return f"{flag}: the rendezvous {url or ''} cannot be opened ({reason})"
