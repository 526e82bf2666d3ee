"""A stand-in for Hugging Face's server, with one model, ``some/model``."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The parts of Hugging Face's server that are asked for a model."""

    sent = 0  # bytes of shards
    broken: str | None = None  # a shard of which only parts are sent
    requests: list[tuple[str, str | None]] = []  # noqa: RUF012 paths and ranges of shards

    def __init__(self, folder: Path, *args: Any) -> None:
        self.folder = folder
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = unquote(self.path.partition("?")[0]).split("/")
        if parts[1:5] == ["api", "models", "some", "model"]:
            names = sorted(path.name for path in self.folder.iterdir())
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            tree = [{"type": "file", "oid": "", "path": name, "size": size} for name, size in sizes.items()]
            info = {"id": "some/model", "sha": COMMIT, "siblings": files}
            body = json.dumps(tree if "tree" in parts else info).encode()
        elif parts[1:4] == ["some", "model", "resolve"] and (self.folder / parts[-1]).exists():
            body = (self.folder / parts[-1]).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if with_body and parts[-1] == Hub.broken and not self.headers.get("Range"):
            self.send_error(500)
            return
        etag = hashlib.sha1(body).hexdigest()
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            total, body = len(body), body[int(first) : int(last or len(body)) + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{total}")
        for name, value in {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if with_body:
            is_shard = parts[-1].endswith(".safetensors")
            if is_shard:
                Hub.requests.append((parts[-1], wanted))
            Hub.sent += len(body) if is_shard else 0
            self.wfile.write(body)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the address of a server that has the model of a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder))
    thread = threading.Thread(target=partial(server.serve_forever, 0.01))  # seconds until it sees that it shall end
    thread.start()
    Hub.sent, Hub.broken, Hub.requests = 0, None, []
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
