"""The static files of the page `/ui`. They are read from the package once and kept with a compressed copy."""

from __future__ import annotations

from gzip import compress
from hashlib import sha256
from importlib.resources import files
from pathlib import PurePosixPath

from aiohttp import web

from llmproxy.gateway.http.errors import nothing_at

PACKAGE = "llmproxy.gateway"
FOLDER = "static"
INDEX = "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


class StaticFiles:
    """Serves the files below `FOLDER`. Reads all files at the first request."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, bytes, str, str]] = {}

    def serve(self, request: web.BaseRequest) -> web.Response:
        """Returns the file at a path below `/ui`. Raises Failure (404)."""
        if not self._files:
            self._read()
        name = request.path.removeprefix("/ui").strip("/") or INDEX
        if name not in self._files:
            raise nothing_at(request.path)
        plain, packed, content_type, etag = self._files[name]
        headers = {**HEADERS, "ETag": etag}
        if etag in request.headers.get("if-none-match", ""):
            return web.Response(status=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return web.Response(
                body=packed, content_type=content_type, charset="utf-8", headers={**headers, "Content-Encoding": "gzip"}
            )
        return web.Response(body=plain, content_type=content_type, charset="utf-8", headers=headers)

    def _read(self) -> None:
        pending = [(files(PACKAGE) / FOLDER, "")]
        while pending:
            folder, prefix = pending.pop()
            for entry in folder.iterdir():
                name = prefix + entry.name
                suffix = PurePosixPath(name).suffix
                if entry.is_dir():
                    pending.append((entry, f"{name}/"))
                elif suffix in TYPES:
                    plain = entry.read_bytes()
                    etag = f'"{sha256(plain).hexdigest()[:20]}"'
                    self._files[name] = (plain, compress(plain, 9), TYPES[suffix], etag)
