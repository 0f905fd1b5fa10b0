"""The page at `/`: the files of `weft/page`, read once, sent with a policy that lets nothing else be loaded.

They need no API key, since a browser can not send one for them; what the page then asks for does. Knows no service.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page:
    """Its files by path."""

    def __init__(self) -> None:
        found = [each for each in (files("weft") / "page").iterdir() if PurePath(each.name).suffix in TYPES]
        self.files = {f"/page/{each.name}": each.read_bytes() for each in found}
        self.files["/"] = self.files.pop("/page/index.html")

    async def file(self, request: Request) -> Response:
        """One of them."""
        path = request.url.path
        return Response(self.files[path], headers=HEADERS, media_type=TYPES[PurePath(path).suffix or ".html"])
