"""Whether Modal's server can be connected to, told in seconds."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from cutex.cloud import server


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as there:
        yield f"http://127.0.0.1:{there.getsockname()[1]}"


def test_a_server_that_listens_is_no_fault(listening):
    assert server.why_silent(listening) is None
    assert server.why_silent(f"http://127.0.0.1:9, {listening}") is None
    assert server.why_silent("unix:///run/modal.sock") is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("https://nobody.invalid", "Name or service not known"),
        ("modal", "it is no URL"),
        ("http://127.0.0.1:x", "Port could not be cast to integer value as 'x'"),
    ],
)
def test_why_there_is_none_is_said(monkeypatch, url, why):
    def look_up(host, *_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if "invalid" in url:  # whatever this machine's resolver does
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert server.why_silent(url) == f"Modal's server {url} cannot be reached: {why}"


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch):
    goes_on = threading.Event()

    def look_up(*_, **__):
        goes_on.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "too late")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    began = time.monotonic()
    why = server.why_silent("https://nobody.invalid", seconds=0.1)
    goes_on.set()
    assert why.endswith("no answer within 0.1 s") and time.monotonic() - began < 30
