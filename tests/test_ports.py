"""Ports for the processes of a job are free, and the kernel gives them to nobody who asks for any port."""

import socket

import pytest

from forgetting_transformer import ports
from tests.processes import free_port


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        free = free_port()  # no other test is given it meanwhile
        assert not ports.is_free(taken) and ports.is_free(free)
        monkeypatch.setattr(ports, "RANGE", [taken, free])
        assert {ports.free_port() for _ in range(20)} == {free}
        monkeypatch.setattr(ports, "RANGE", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"no port from {taken} to {taken} is free"):
            ports.free_port()
