"""Modal's server: whether this machine can connect to it, known in seconds.

Its client tries for a minute before it says that there is none. Like it, this goes by the proxy
that HTTPS_PROXY (HTTP_PROXY for a server of http), ALL_PROXY and NO_PROXY say.
"""

from __future__ import annotations

import base64
import socket
import threading
from importlib.util import find_spec
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 5.0
MOST = 4096  # bytes of a proxy's answer that are read
SOCKS = "socks4", "socks4a", "socks5", "socks5h"
PORTS = {"http": 80, "https": 443, **dict.fromkeys(SOCKS, 1080)}


def why_silent(urls: str, seconds: float = SECONDS, proxies: bool = True) -> str | None:
    """Return why no server of `urls` (several with commas between them, as in MODAL_SERVER_URL)
    can be connected to within `seconds`, in one sentence; None if one can. `proxies`: whether the
    client goes by the environment's proxy."""
    silent: list[str] = []
    answered = threading.Event()

    def connect(url: str) -> None:
        try:
            address = _address(url)
            proxy = _proxy_of(url) if proxies else None
            if proxy is None:
                socket.create_connection(address, timeout=seconds).close()
            else:
                _connect_through(proxy, address, seconds)
            answered.set()
        except (OSError, ValueError) as error:
            silent.append(getattr(error, "strerror", None) or str(error))

    tried = [url.strip() for url in urls.split(",")]
    if any(url.startswith("unix:") for url in tried):  # a socket of this machine
        return None
    # NOTE: threads, because a look-up of a name takes as long as the resolver wants
    threads = [threading.Thread(target=connect, args=(url,), daemon=True) for url in tried]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if answered.is_set():
        return None
    why = silent[0] if silent else f"no answer within {seconds:g} s"
    return f"Modal's server {urls} cannot be reached: {why}"


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ValueError("it is no URL")
    return parts.hostname, parts.port or PORTS.get(parts.scheme, 443)


# ---- proxies


def _proxy_of(url: str) -> str | None:
    """The proxy that Modal's client takes to `url`, or None."""
    parts = urlsplit(url)
    if parts.hostname is not None and proxy_bypass(parts.hostname):
        return None
    found = getproxies()
    return found.get(parts.scheme) or found.get("all") or None


def _connect_through(proxy: str, address: tuple[str, int], seconds: float) -> None:
    """Connect to `address` through an HTTP proxy; of another kind of proxy, to the proxy. Raises
    OSError or ValueError, whose text has no password of the proxy's."""
    parts = urlsplit(proxy)
    schemes = "http", *SOCKS
    if parts.scheme not in schemes or parts.hostname is None:
        raise ValueError(f"the environment's proxy is no URL of {', '.join(schemes)}")
    shown = f"the proxy {parts.scheme}://{parts.hostname}:{parts.port or PORTS[parts.scheme]}"
    if find_spec("python_socks") is None:
        raise ValueError(
            f"{shown} needs the package python-socks: pip install 'modal[api-proxy-support]'"
        )
    try:
        with socket.create_connection(_address(proxy), timeout=seconds) as there:
            if parts.scheme == "http":
                _ask(there, parts, address)
    except OSError as error:
        raise ValueError(f"{shown}: {error.strerror or error}") from None


def _ask(there: socket.socket, proxy: SplitResult, address: tuple[str, int]) -> None:
    """Have an HTTP proxy connect to `address` (RFC 9110, section 9.3.6)."""
    target = f"{address[0]}:{address[1]}"
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.username is not None:
        known = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(known).decode()}")
    there.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    answer = b""
    while b"\n" not in answer and len(answer) < MOST and (more := there.recv(MOST)):
        answer += more
    status = answer.split(b"\n")[0].decode("latin-1").strip()
    version, _, code = status.partition(" ")
    if not version.startswith("HTTP/") or not code.startswith("2"):
        raise OSError(f"it answers {status[:100]!r} to CONNECT {target}")
