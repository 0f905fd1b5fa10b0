"""How tests ask a server over HTTP. Reading the certificates, which plain HTTP never needs, would cost 23 ms a request."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import httpx2

from waiting import HANG_SECONDS

OPTIONS: dict[str, Any] = {"timeout": HANG_SECONDS, "verify": False}


class Asked:
    """A server at a URL on this machine, asked by a new connection each time."""

    url: str

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, **OPTIONS, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        """Post a body as JSON; `content` among the options is sent as it is."""
        return httpx2.post(self.url + path, json=body, **OPTIONS, **options)

    def stream(self, path: str, body: Any, **options: Any) -> AbstractContextManager[httpx2.Response]:
        """Post a body as JSON and read the reply as it comes."""
        return httpx2.stream("POST", self.url + path, json=body, **OPTIONS, **options)

    def watch(self, path: str, **options: Any) -> AbstractContextManager[httpx2.Response]:
        """Read the reply to a GET as it comes."""
        return httpx2.stream("GET", self.url + path, **OPTIONS, **options)

    def delete(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.delete(self.url + path, **OPTIONS, **options)
