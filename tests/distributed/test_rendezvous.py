"""Processes meet in a store: on the loopback or between machines, by address, file or torchrun's variables."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from mistakes import user_error

from fairseq.distributed import rendezvous
from fairseq.errors import UserError

FLAG = "^--distributed-init-method"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start at once."""
    monkeypatch.setattr(rendezvous, "_SLOWEST_START", 0.2)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables that tests change, also those that the code under test sets."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return monkeypatch


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_store_named_by_the_loopback_listens_there_only(host: str, free_port: int) -> None:
    store, url = rendezvous.listen(f"tcp://{host}:{free_port}", 7)
    assert url == f"tcp://{host}:{free_port}" and store.timeout == timedelta(seconds=7)
    with socket.socket() as other:  # a listener on every interface would be in the way of this one
        other.bind(("127.0.0.2", free_port))
    store.set("key", "value")
    assert rendezvous.connect(url, 1, 2, 60).get("key") == b"value"


def test_a_job_of_one_machine_has_a_free_port_of_the_loopback() -> None:
    (first, url), (second, other) = rendezvous.listen(None, 7), rendezvous.listen(None, 7)
    assert url.startswith("tcp://127.0.0.1:") and port_of(url) > 0 and url != other
    first.set("key", "first")
    second.set("key", "second")
    assert [rendezvous.connect(address, 1, 2, 60).get("key") for address in (url, other)] == [b"first", b"second"]


def test_a_store_named_by_another_address_of_the_machine_listens_on_all() -> None:
    store, url = rendezvous.listen("tcp://127.0.0.3:0", 7)
    assert url == f"tcp://127.0.0.3:{port_of(url)}"
    store.set("key", "value")
    assert rendezvous.connect(url.replace("127.0.0.3", "127.0.0.2"), 1, 2, 60).get("key") == b"value"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.2", port_of(url)))


@pytest.mark.parametrize("text, reason", [("no threads\nException raised from …", "no threads"), ("", "RuntimeError")])
def test_a_store_that_cannot_be_opened_is_refused_by_the_first_line_of_its_error(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(rendezvous.dist, "TCPStore", fail)
    with pytest.raises(UserError) as of_url:
        rendezvous.listen("tcp://127.0.0.1:0", 7)
    flags = "--distributed-init-method or --distributed-port"
    assert of_url.value.with_flags == f"{flags}: the rendezvous tcp://127.0.0.1:0 cannot be opened ({reason})"
    with user_error(rf"^--distributed-port: the rendezvous +cannot be opened \({reason}\)$"):
        rendezvous.listen(None, 7)


@pytest.mark.parametrize(
    "url", ["tcp://:80", "tcp://host", "tcp://host:a", "tcp://host:99999", "tcp://[host:80", "http://host:80"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UserError) as error:
        rendezvous.listen(url, 7)
    assert error.value.with_flags == f"--distributed-init-method {url}: must be tcp://host:port, file://path or env://"


def test_only_an_address_that_accepts_connections_is_reachable(free_port: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert not rendezvous.is_reachable(url, 5)
        listener.listen(0)
        assert rendezvous.is_reachable(url, 5)
        assert not rendezvous.is_reachable(url, 0.1), "its queue is full: it does not answer"
    assert rendezvous.is_reachable("file:///anywhere", 5) and rendezvous.is_reachable("env://", 5)


def test_rank_0_opens_the_store_of_an_address() -> None:
    assert rendezvous.hosts_store("tcp://127.0.0.1:80", 0)
    assert not rendezvous.hosts_store("tcp://127.0.0.1:80", 1)
    assert not rendezvous.hosts_store("file:///tmp/meeting", 0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "url, source",
    [
        ("tcp://127.0.0.1:{port}", "--distributed-init-method or --distributed-port"),
        ("env://", "MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_a_store_that_does_not_open_in_time_is_refused(
    url: str, source: str, free_port: int, environment: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", free_port)):
        environment.setenv(name, str(value))
    named = f"^{source}: the rendezvous {url.format(port=free_port)} cannot be opened .*[0-9]"
    with user_error(named):
        rendezvous.connect(url.format(port=free_port), 1, 2, 0.1)


def test_an_unknown_kind_of_rendezvous_is_refused() -> None:
    with user_error(f"{FLAG}: the rendezvous carrier-pigeon://coop cannot be opened"):
        rendezvous.connect("carrier-pigeon://coop", 1, 2, 60)


def test_a_late_store_is_waited_for_as_long_as_torch_takes_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def connected(*_: object, timeout: timedelta, **__: object) -> dist.Store:
        waited.append(timeout.total_seconds())
        return dist.HashStore()

    monkeypatch.setattr(rendezvous.dist, "TCPStore", connected)
    stores = [rendezvous.connect("tcp://127.0.0.1:80", 1, 2, limit) for limit in (7, 900)]
    assert waited == [300, 900]
    assert [store.timeout.total_seconds() for store in stores] == [7, 900], "of later requests"


def test_processes_meet_in_a_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    first, second = (rendezvous.connect(url, rank, 2, 9) for rank in (0, 1))
    first.set("key", "value")
    assert second.get("key") == b"value" and second.timeout == timedelta(seconds=9)


def test_a_file_of_more_processes_outlives_the_first_that_leave(tmp_path: Path) -> None:
    first, second = (rendezvous.connect(f"file://{tmp_path}/meeting", rank, 3, 9) for rank in (0, 1))
    first.set("key", "value")
    del first, second
    assert rendezvous.connect(f"file://{tmp_path}/meeting", 2, 3, 9).get("key") == b"value"


@pytest.mark.parametrize(
    "name, reason", [("file/below", "cannot be written"), ("", "Is a directory"), ("pipe", "a pipe")]
)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(rendezvous.dist, "rendezvous", lambda *args, **flags: pytest.fail("torch tries until its end"))
    with user_error(f"{FLAG} .*{reason}"):
        rendezvous.connect(f"file://{tmp_path}/{name}", 0, 2, 60)


# ---- meeting ---------------------------------------------------------------------------------------------------------


def test_process_that_never_joins_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(rendezvous, "_SLOWEST_START", 0.0)
    store, _ = rendezvous.listen(None, timeout=0.2)
    with pytest.raises(UserError, match="of 3 processes, 1, 2 did not join within 0.2 s"):
        rendezvous.meet(store, 0, 3, 0.2)
    assert "waiting up to 0.2 s for processes 1, 2 of 3" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_of_many_that_do_not_join_eight_are_named() -> None:
    store = dist.HashStore()
    with pytest.raises(UserError, match="of 20 processes, 0, 1, 2, 3, 5, 6, 7, 8 did not join within 0.2 s"):
        rendezvous.meet(store, 4, 20, 0.1)


def test_those_who_have_met_say_nothing_and_the_log_names_who_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_QUIET", 0.1)
    server, url = rendezvous.listen(None, 60)
    first, second = (rendezvous.connect(url, rank, 2, 60) for rank in (0, 1))

    class Late(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            rendezvous.meet(second, 1, 2, 60)

    late = Late()
    rendezvous.logger.addHandler(late)
    with caplog.at_level("INFO"):
        rendezvous.meet(first, 0, 2, 60)
    rendezvous.logger.removeHandler(late)
    assert caplog.messages == ["rendezvous: waiting up to 300 s for processes 1 of 2"]
    assert server.get("joined/1").decode() == socket.gethostname()


# ---- torchrun --------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchrun(environment: pytest.MonkeyPatch) -> Iterator[str]:
    """The variables of a process that torchrun started; the address of its store."""
    server, url = rendezvous.listen(None, 60)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": url.rpartition(":")[2]}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in variables.items():
        environment.setenv(name, value)
    yield url
    del server


def test_processes_that_torchrun_starts_again_do_not_read_what_those_before_left(
    torchrun: str, environment: pytest.MonkeyPatch
) -> None:
    stores = []
    for attempt in "01":
        environment.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(rendezvous.connect("env://", 0, 2, 60))
        assert not stores[-1].check(["joined/0"]), "nobody of this attempt has joined"
        stores[-1].set("joined/0", "host")
    assert all(store.check(["joined/0"]) for store in stores)
    assert not rendezvous.connect(torchrun, 0, 2, 60).check(["joined/0"]), "nor by its address"
    environment.delenv("TORCHELASTIC_RESTART_COUNT")
    assert rendezvous.connect("env://", 0, 2, 60).check(["joined/0"]), "the first attempt may have no number"


@pytest.mark.parametrize("name, value", [("GROUP_WORLD_SIZE", "2"), ("TORCHELASTIC_USE_AGENT_STORE", "False")])
def test_starts_have_names_only_within_one_agents_store(
    torchrun: str, environment: pytest.MonkeyPatch, name: str, value: str
) -> None:
    environment.setenv("RANK", "1")
    environment.setenv(name, value)
    rendezvous.connect("env://", 1, 2, 60).set("key", "value")
    assert rendezvous.connect(torchrun, 1, 2, 60).get("key") == b"value", "whose address is used as it is"


# ---- loopback --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url, interfaces, expected",
    [
        ("tcp://127.0.0.1:80", ["eth0", "lo"], "lo"),
        ("tcp://localhost:80", ["lo0", "en0"], "lo0"),
        ("tcp://[::1]:80", ["eth0", "lo", "eth1"], "lo"),
        ("tcp://127.0.0.1:80", ["eth0"], None),
        ("tcp://node0:80", ["lo"], None),
        ("file:///tmp/meeting", ["lo"], None),
        ("env://", ["lo"], None),
    ],
)
def test_gloo_stays_on_the_loopback_where_the_rendezvous_is_there(
    environment: pytest.MonkeyPatch, url: str, interfaces: list[str], expected: str | None
) -> None:
    environment.setattr(socket, "if_nameindex", lambda: list(enumerate(interfaces, start=1)))
    rendezvous.stay_on_loopback(url)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    environment.setenv("GLOO_SOCKET_IFNAME", "ib0")
    rendezvous.stay_on_loopback(url)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "as the user says"
