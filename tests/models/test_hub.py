"""The hub's route, against a server of this process that answers as the hub does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def serve(files: Path, requests: list[str]) -> ThreadingHTTPServer:
    """One public repository `org/name`, one gated `org/gated`; everything else is 404."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *args):
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            names = [*sorted(p.name for p in files.iterdir()), "onnx/model.safetensors", "x.py"]
            if path == "/":
                self.answer(200)
            elif path.startswith("/api/models/org/name/revision/"):
                siblings = [{"rfilename": n} for n in names]
                info = {"_id": "1", "id": "org/name", "sha": COMMIT, "siblings": siblings}
                self.answer(200, json.dumps(info).encode(), Content_Type="application/json")
            elif path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
                sizes = {p.name: p.stat().st_size for p in files.iterdir()}
                tree = [
                    {"type": "file", "oid": "1", "size": sizes.get(n, 1), "path": n} for n in names
                ]
                self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            elif path.startswith("/api/models/org/gated/"):
                self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="ask first")
            elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
                body = (files / path.rsplit("/", 1)[1]).read_bytes()
                digest = hashlib.sha256(body).hexdigest()
                self.answer(200, body, ETag=f'"{digest}"', X_Repo_Commit=COMMIT)
            else:
                self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="not found")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def ask(server: ThreadingHTTPServer, home: Path, name: str) -> Any:
    """Pull in a process of its own: the hub's library reads its settings at import."""
    code = (
        "import json, sys\nfrom treadle.errors import ModelError\n"
        "from treadle.models import files, load, pull\n"
        "try:\n"
        "    path = pull.pull(sys.argv[1])\n"
        "    source = load.provenance(path, files.weight_files(path))\n"
        "    print(json.dumps([str(path), source.source, source.sha256]))\n"
        "except ModelError as error:\n"
        "    print(json.dumps({'message': error.message, 'hint': error.hint}))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "TREADLE_CACHE": str(home / "treadle"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def hub(tiny_dir):
    requests: list[str] = []
    server = serve(tiny_dir, requests)
    yield server, requests
    server.shutdown()
    server.server_close()


def test_a_hub_id_is_downloaded_once_and_only_what_is_needed(hub, tmp_path, tiny_dir):
    server, requests = hub
    answer = ask(server, tmp_path, "org/name")
    assert isinstance(answer, list), answer
    path, source, sha256 = answer
    assert source == f"hf:org/name@{COMMIT}"
    assert sha256 == hashlib.sha256((tiny_dir / "model.safetensors").read_bytes()).hexdigest()
    assert not any("onnx" in r or "x.py" in r for r in requests)
    requests.clear()
    assert ask(server, tmp_path, "org/name")[0] == path
    assert requests == []


def test_what_the_hub_refuses_is_told_with_the_next_step(hub, tmp_path):
    server, _ = hub
    missing = ask(server, tmp_path, "org/missing")
    assert "no such model" in missing["message"] and "spelling" in missing["hint"]
    gated = ask(server, tmp_path, "org/gated")
    assert "grant access" in gated["message"] and "HF_TOKEN" in gated["hint"]
