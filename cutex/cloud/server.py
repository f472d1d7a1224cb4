"""Modal's server: whether this machine can connect to it, known in seconds.

Its client tries for a minute before it says that there is none.
"""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

SECONDS = 5.0


def why_silent(urls: str, seconds: float = SECONDS) -> str | None:
    """Return why no server of `urls` (several with commas between them, as in MODAL_SERVER_URL)
    can be connected to within `seconds`, in one sentence; None if one can."""
    silent: list[str] = []
    answered = threading.Event()

    def connect(url: str) -> None:
        try:
            with socket.create_connection(_address(url), timeout=seconds):
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
    return parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
