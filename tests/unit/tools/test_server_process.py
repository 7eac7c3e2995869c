"""Servers are started, watched and stopped with all their children, for real."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from vllm_mtp.tools import server_process
from vllm_mtp.tools.server_process import (
    Program,
    ProgramGroup,
    Server,
    ServerError,
    ServerGroup,
    exit_on_signals,
    find_cause,
    free_ports,
    http_get,
    serve_environ,
)

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
START_TIMEOUT_S = 30.0


def fake_server(folder: Path, behaviour: str) -> Server:
    port = free_ports(1)[0]
    command = [sys.executable, str(FAKE_SERVER), str(port), behaviour]
    return Server(behaviour, command, port, folder / f"{behaviour}.log")


def group_of(*servers: Server) -> ServerGroup:
    return ServerGroup(servers, os.environ)


def child_of(server: Server) -> int:
    found = re.search(r"child (\d+)", server.log.read_text())
    assert found, server.log.read_text()
    return int(found[1])


def has_ended(server: Server) -> bool:
    """Whether a server that was started is noticed to have ended."""
    with pytest.raises(ServerError, match="ended with exit code") as caught:
        server.check_alive()
    return server.name in str(caught.value)


def ends_soon(pid: int) -> bool:
    """Whether a process that was told to end does."""
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ignore(text: str) -> None:
    """Take no notice of progress."""


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3


def test_a_group_answers_and_is_gone_with_its_children_afterwards(
    tmp_path: Path,
) -> None:
    server = fake_server(tmp_path, "good")
    with group_of(server) as group:
        group.wait_ready(START_TIMEOUT_S, ignore)
        assert http_get(f"{server.url}/health") == "fine"
        child = child_of(server)
        assert is_running(child)
    assert ends_soon(child)
    assert has_ended(server)


def test_a_server_that_ignores_the_polite_signal_is_stopped_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "STOP_TIMEOUT_S", 0.5)
    server = fake_server(tmp_path, "stubborn")
    with group_of(server) as group:
        group.wait_ready(START_TIMEOUT_S, ignore)
        child = child_of(server)
    assert ends_soon(child)
    assert has_ended(server)


def test_an_error_inside_stops_the_servers(tmp_path: Path) -> None:
    server = fake_server(tmp_path, "good")

    def fail_inside() -> None:
        with group_of(server) as group:
            group.wait_ready(START_TIMEOUT_S, ignore)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert has_ended(server)


def test_a_dead_server_is_reported_with_its_cause_and_log(tmp_path: Path) -> None:
    alive, dead = fake_server(tmp_path, "good"), fake_server(tmp_path, "dead")

    def start() -> None:
        with group_of(alive, dead) as group:
            group.wait_ready(START_TIMEOUT_S, ignore)

    with pytest.raises(ServerError) as caught:
        start()
    message = str(caught.value)
    assert "'dead' ended with exit code 3" in message
    assert "after 'ValueError: there is no such model'" in message
    assert "  | RuntimeError: engine failed" in message
    assert has_ended(alive)


def test_waiting_ends_when_its_time_is_over(tmp_path: Path) -> None:
    server = fake_server(tmp_path, "deaf")
    with (
        pytest.raises(ServerError, match="'deaf' did not answer within 1 s"),
        group_of(server) as group,
    ):
        group.wait_ready(1.0, ignore)
    assert has_ended(server)


def test_progress_says_who_is_waited_for_and_what_he_does(tmp_path: Path) -> None:
    server = fake_server(tmp_path, "deaf")
    lines: list[str] = []
    with pytest.raises(ServerError), group_of(server) as group:
        group.wait_ready(2.0, lines.append)
    assert "deaf: importing vLLM" in lines[0]
    assert "deaf: loading weights" in lines[-1]


def test_a_failed_start_stops_those_already_started(tmp_path: Path) -> None:
    good = fake_server(tmp_path, "good")
    missing = Server("missing", [str(tmp_path / "no-program")], 1, tmp_path / "m.log")
    with pytest.raises(FileNotFoundError), group_of(good, missing):
        pass
    assert has_ended(good)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_becomes_an_exception_and_handlers_come_back(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, exit_on_signals():
        signal.raise_signal(number)
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_the_cause_is_the_first_exception_of_a_log() -> None:
    lines = [
        "INFO no ValueError here",
        "(EngineCore pid=7) torch.OutOfMemoryError: too big",
        "RuntimeError: Engine core initialization failed",
    ]
    assert find_cause(lines) == "torch.OutOfMemoryError: too big"
    assert find_cause(lines[:1]) is None


def test_a_program_that_fails_is_an_error_with_its_log(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "print('the end'); raise SystemExit(3)"]
    program = Program("the client", failing, tmp_path / "log")
    with (
        pytest.raises(
            ServerError, match=r"the client ended with exit code 3.*"
        ) as error,
        ProgramGroup([program], os.environ),
    ):
        program.wait_done(START_TIMEOUT_S)
    assert "| the end" in str(error.value)


def test_a_program_that_goes_on_is_stopped_when_its_time_is_over(
    tmp_path: Path,
) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    program = Program("the client", sleeping, tmp_path / "log")
    with (
        pytest.raises(ServerError, match="did not end within"),
        ProgramGroup([program], os.environ),
    ):
        program.wait_done(0.2)
    assert not is_running(program.pid)


def test_the_hub_is_asked_only_for_models_that_are_not_here(tmp_path: Path) -> None:
    here = serve_environ({"PATH": "/bin"}, tmp_path, local_model=True, on_gpu=False)
    assert here["HF_HUB_OFFLINE"] == "1"
    assert here["PATH"] == "/bin"
    there = serve_environ({}, tmp_path, local_model=False, on_gpu=False)
    assert "HF_HUB_OFFLINE" not in there


def test_engine_and_worker_share_a_process_on_a_cpu_only(tmp_path: Path) -> None:
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    assert serve_environ({}, tmp_path, local_model=True, on_gpu=False)[name] == "0"
    assert name not in serve_environ({}, tmp_path, local_model=True, on_gpu=True)
