"""Whether Modal's server can be connected to, told in seconds."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from cutex.cloud import server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


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


# ---- behind a proxy


@pytest.fixture
def proxy(monkeypatch):
    """An HTTP proxy that answers with `answer` and keeps what it was asked."""
    monkeypatch.setattr(server, "find_spec", lambda name: name)
    with socket.create_server(("127.0.0.1", 0)) as there:
        asked: list[bytes] = []

        def serve():
            while True:
                try:
                    one, _ = there.accept()
                except OSError:
                    return
                with one:
                    asked.append(one.recv(4096))
                    one.sendall(proxy_of.answer)

        def proxy_of():
            return f"127.0.0.1:{there.getsockname()[1]}"

        proxy_of.answer, proxy_of.asked = b"HTTP/1.1 200 Connection established\r\n\r\n", asked
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield proxy_of
        there.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_a_server_is_asked_for_through_the_proxy(monkeypatch, proxy):
    """Whose name this machine cannot look up."""
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:p%40ss@{proxy()}")
    assert server.why_silent("https://nobody.invalid") is None
    assert proxy.asked[0].startswith(b"CONNECT nobody.invalid:443 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==\r\n" in proxy.asked[0]


@pytest.mark.parametrize("name", ["ALL_PROXY", "https_proxy"])
def test_what_the_proxy_answers_is_said_without_its_password(monkeypatch, proxy, name):
    proxy.answer = b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"
    monkeypatch.setenv(name, f"http://me:secret@{proxy()}")
    why = server.why_silent("https://nobody.invalid")
    assert "it answers 'HTTP/1.1 407 Proxy Authentication Required' to CONNECT nobody" in why
    assert f"the proxy http://{proxy()}" in why and "secret" not in why


def test_other_proxies_are_connected_to(monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", f"socks5h://{proxy()}")
    assert server.why_silent("https://nobody.invalid") is None
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    why = server.why_silent("https://nobody.invalid")
    assert why.endswith("the proxy socks5://127.0.0.1:9: Connection refused")
    for other in ("https://127.0.0.1:9", "127.0.0.1:9", "gopher://:9"):
        monkeypatch.setenv("ALL_PROXY", other)
        why = server.why_silent("https://nobody.invalid")
        assert why.endswith("proxy is no URL of http, socks4, socks4a, socks5, socks5h")


def test_no_proxy_is_taken_where_the_client_takes_none(monkeypatch, listening):
    monkeypatch.setattr(server, "find_spec", lambda name: name)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert "the proxy http://127.0.0.1:9: Connection refused" in server.why_silent(listening)
    assert server.why_silent(listening, proxies=False) is None
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert server.why_silent(listening) is None


def test_the_package_that_the_client_needs_for_a_proxy_is_named(monkeypatch):
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    why = server.why_silent("https://nobody.invalid")
    assert why.endswith("needs the package python-socks: pip install 'modal[api-proxy-support]'")
