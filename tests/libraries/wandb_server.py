"""A server for the real wandb: it keeps the rows of each run as wandb sends them, and returns where a run continues."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_USER = {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
_SERVER = {"features": [], "featureFlags": [], "cliVersionInfo": {"max_cli_version": "0.99.0"}}


class WandbServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, dict[str, Any]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that make wandb use it."""
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}", "WANDB_API_KEY": "a" * 40}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing after a client was killed."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Yield a running server."""
    with WandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *args: Any) -> None:
        return

    def _send(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        try:
            asked = json.loads(body)
        except ValueError:  # telemetry
            self._send({})
            return
        if "file_stream" in self.path:
            self._take_rows(self.server.runs[self.path.split("/")[-2]], asked)
            self._send({"limits": {}, "exitcode": None})
        else:
            self._send({"data": self._answer(asked)})

    def _take_rows(self, run: dict[str, Any], sent: dict[str, Any]) -> None:
        part = (sent.get("files") or {}).get("wandb-history.jsonl")
        if part is not None:
            rows = [json.loads(line) for line in part["content"]]
            run["rows"][part["offset"] : part["offset"] + len(rows)] = rows
        if sent.get("complete") is not None:
            run["state"] = "finished" if sent.get("exitcode") == 0 else "failed"

    def _answer(self, asked: dict[str, Any]) -> Any:
        variables = asked.get("variables") or {}
        found = re.search(r"(?:query|mutation)\s+(\w+)", asked.get("query", ""))
        name = "" if found is None else found.group(1)
        if name == "RunResumeStatus":
            run = self.server.runs.get(variables["name"])
            bucket = None if run is None else {**_bucket(variables["name"], run), **_resumed(run)}
            return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": bucket}}
        if name == "UpsertBucket":
            run = self.server.runs.setdefault(variables["name"], {"rows": [], "config": "{}"})
            run["state"] = "running"
            run["config"] = variables.get("config") or run["config"]
            return {"upsertBucket": {"bucket": _bucket(variables["name"], run), "inserted": True}}
        if name == "CreateRunFiles":
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}}
        return {"viewer": _USER, "serverInfo": _SERVER}


def _bucket(run_id: str, run: dict[str, Any]) -> dict[str, Any]:
    project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
    names = {"id": f"x{run_id}", "name": run_id, "displayName": "n", "description": "", "sweepName": None}
    return {**names, "config": run["config"], "historyLineCount": len(run["rows"]), "project": project}


def _resumed(run: dict[str, Any]) -> dict[str, Any]:
    tail = json.dumps([json.dumps(row) for row in run["rows"][-1:]])
    counts = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "tags": []}
    return {**counts, "summaryMetrics": "{}", "historyTail": tail, "wandbConfig": json.dumps({"t": 1})}
