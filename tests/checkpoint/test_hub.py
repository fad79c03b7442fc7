"""Hub ids: a cache on the disk, and a hub on this machine; nothing here leaves it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import models

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


def cached(cache: Path, source: Path, commit: str, ref: str) -> Path:
    """Put a folder into a hub cache as the hub's library lays it out."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    for path in source.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        (repo / "blobs" / blob).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, since the hub's library reads its settings when it is imported."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment = {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", **environment}
    return subprocess.run(
        [sys.executable, "-m", "w4plugin", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**keep, **environment},
        check=False,
    )


def test_a_cached_snapshot_is_found_offline(tmp_path: Path) -> None:
    cached(tmp_path / "cache", models.awq(tmp_path / "a"), COMMIT, "main")
    cached(tmp_path / "cache", models.gptq(tmp_path / "b"), OTHER, "gptq-4bit-32g")
    where = ("--cache-dir", tmp_path / "cache", "--format", "json")
    done = run("inspect", "org/name", *where, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["source"]["repo"] == "org/name"
    assert result["source"]["commit"] == COMMIT
    assert result["config"]["method"] == "awq"
    done = run("inspect", "org/name", "--revision", "gptq-4bit-32g", *where, HF_HUB_OFFLINE="1")
    assert json.loads(done.stdout)["config"]["method"] == "gptq"
    done = run("repack", "org/name", tmp_path / "out", *where, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model: org/name" in card
    assert COMMIT in card
    done = run("verify", "org/name", tmp_path / "out", *where, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr


def test_a_cached_snapshot_is_found_when_the_hub_does_not_answer(tmp_path: Path) -> None:
    cached(tmp_path / "cache", models.awq(tmp_path / "a"), COMMIT, "main")
    done = run("inspect", "org/name", "--cache-dir", tmp_path / "cache", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr


def test_what_is_not_cached_is_an_io_error_offline(tmp_path: Path) -> None:
    done = run("inspect", "org/other", "--cache-dir", tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 5
    assert "not in the cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_link_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "cache", models.awq(tmp_path / "a"), COMMIT, "main")
    (tmp_path / "secret").write_bytes((snapshot / "model.safetensors").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "secret")
    done = run("inspect", "org/name", "--cache-dir", tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert done.returncode == 4
    assert "leaves the checkpoint's folder" in done.stderr


class Hub(ThreadingHTTPServer):
    """A hub that holds one repository and remembers what it was asked and sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = folder
        self.asked: list[tuple[str, str, str | None]] = []
        self.ranges: list[tuple[str, str]] = []
        self.sent: dict[str, Any] = {}
        self.blobs: dict[str, bytes] = {}
        self.private = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """The few addresses of the hub's interface that its library uses here."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any, status: int = 200) -> None:
        self._reply(status, json.dumps(content).encode(), Content_Type="application/json")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _note(self) -> str:
        path = self.path.split("?")[0]
        self.server.asked.append((self.command, path, self.headers.get("Authorization")))
        return path

    def do_GET(self) -> None:
        path = self._note()
        names = sorted(p.name for p in self.server.folder.iterdir())
        if path == "/api/models/me/out":
            return self._json({"id": "me/out", "modelId": "me/out", "private": self.server.private, "siblings": []})
        if path.startswith("/api/models/org/name"):
            if "/tree/" in path:
                entries = [self._entry(name) for name in names]
                return self._json(entries)
            if path.endswith("/missing"):
                return self._reply(404, b"{}", X_Error_Code="RevisionNotFound")
            siblings = [{"rfilename": name} for name in names]
            return self._json({"id": "org/name", "modelId": "org/name", "sha": COMMIT, "siblings": siblings})
        if path.startswith(f"/org/name/resolve/{COMMIT}/"):
            return self._file(path.rpartition("/")[2])
        return self._reply(404, b"{}", X_Error_Code="RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _entry(self, name: str) -> dict[str, Any]:
        content = (self.server.folder / name).read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": oid}

    def _file(self, name: str) -> None:
        content = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X_Repo_Commit": COMMIT}
        if asked := self.headers.get("Range"):
            self.server.ranges.append((self.path, asked))
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            part = content[int(start) : int(stop or len(content)) + 1]
            headers["Content_Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}"
            return self._reply(206, part, **headers)
        return self._reply(200, content, Content_Length=str(len(content)), **headers)

    def do_POST(self) -> None:
        path, body = self._note(), self._body()
        if path == "/api/repos/create":
            self.server.sent["create"] = json.loads(body)
            return self._json({"url": f"{self.server.address}/me/out", "id": "me/out"})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            return self._json({"files": [
                {"path": f["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"} for f in files
            ]})  # fmt: skip
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for o in objects:
                o["actions"] = {"upload": {"href": f"{self.server.address}/lfs/{o['oid']}", "header": {}}}
            return self._json({"transfer": "basic", "objects": objects})
        if path.endswith("/commit/main"):
            self.server.sent["commit"] = [json.loads(line) for line in body.splitlines()]
            return self._json({"commitUrl": f"{self.server.address}/me/out/commit/{OTHER}", "commitOid": OTHER})
        return self._reply(404, b"{}")

    def do_PUT(self) -> None:
        path, body = self._note(), self._body()
        self.server.blobs[path.rpartition("/")[2]] = body
        self._reply(200)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = Hub(models.awq(tmp_path / "served"))
    (tmp_path / "served" / "pytorch_model.bin").write_bytes(b"not wanted")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_inspect_fetches_headers_alone(tmp_path: Path, hub: Hub) -> None:
    where = ("--cache-dir", tmp_path / "cache", "--token", "hf_secret", "--format", "json")
    weights = hub.folder / "model.safetensors"
    padded = weights.read_bytes()
    header = json.loads(padded[8 : 8 + int.from_bytes(padded[:8], "little")])
    header["__metadata__"] = {"note": "x" * 200_000}  # longer than what is fetched at first
    text = json.dumps(header).encode()
    data = padded[8 + int.from_bytes(padded[:8], "little") :]
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data)
    done = run("inspect", "org/name", *where, HF_ENDPOINT=hub.address, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["source"]["commit"] == COMMIT
    assert len(result["modules"]) == 3
    ranges = [asked for path, asked in hub.ranges if path.endswith(".safetensors")]
    assert ranges == ["bytes=0-99999", f"bytes=0-{len(text) + 7}"]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-50])
    done = run("inspect", "org/name", *where, HF_ENDPOINT=hub.address, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 4
    assert "50 are missing" in done.stderr


def test_a_tensor_is_fetched_by_itself(tmp_path: Path, hub: Hub) -> None:
    code = (
        "import sys, torch; from safetensors.torch import load_file;"
        "from w4plugin.checkpoint.checkpoint import Checkpoint;"
        "found = Checkpoint.open('org/name', cache_dir=sys.argv[1], headers_only=True);"
        "name = next(n for n in found.headers if n.endswith('qzeros'));"
        "assert torch.equal(found.tensor(name), load_file(sys.argv[2])[name])"
    )
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment = {**keep, "NO_PROXY": "*", "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
    weights = hub.folder / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "cache", weights],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranges = [asked for path, asked in hub.ranges if path.endswith(".safetensors")]
    assert len(ranges) == 2
    assert not ranges[1].startswith("bytes=0-")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_download_is_cached_and_pickles_stay_there(tmp_path: Path, hub: Hub) -> None:
    where = ("--cache-dir", tmp_path / "cache", "--token", "hf_secret", "--format", "json")
    done = run("verify", "org/name", *where, HF_ENDPOINT=hub.address, HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"]["commit"] == COMMIT
    paths = [path for _, path, _ in hub.asked]
    assert any(path.endswith("model.safetensors") for path in paths)
    assert not any(path.endswith("pytorch_model.bin") for path in paths)
    assert {token for _, _, token in hub.asked} == {"Bearer hf_secret"}
    assert "hf_secret" not in done.stdout + done.stderr
    count = len(hub.asked)
    done = run("inspect", "org/name", *where, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(hub.asked) == count


def test_a_revision_or_repository_that_does_not_exist(tmp_path: Path, hub: Hub) -> None:
    where = ("--cache-dir", tmp_path / "cache")
    done = run("inspect", "org/name", "--revision", "missing", *where, HF_ENDPOINT=hub.address)
    assert done.returncode == 2, done.stderr
    assert "org/name@missing: got no such revision" in done.stderr
    done = run("inspect", "org/nothing", *where, HF_ENDPOINT=hub.address)
    assert done.returncode == 2, done.stderr
    assert "no such repository" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_network_is_an_io_error(tmp_path: Path) -> None:
    done = run("inspect", "org/name", "--cache-dir", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr


def test_push_to_hub(tmp_path: Path, hub: Hub) -> None:
    source = models.gptq(tmp_path / "in")
    settings = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
    done = run("repack", source, tmp_path / "out", "--push-to-hub", "me/out", "--private", "--token", "hf_secret",
               "--format", "json", **settings)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["uploaded"].endswith(OTHER)
    created = hub.sent["create"]
    assert created.get("visibility") == "private" or created.get("private") is True  # spelled so by older versions
    committed = {entry["value"].get("path") for entry in hub.sent["commit"] if entry["key"] != "header"}
    assert committed == {p.name for p in (tmp_path / "out").iterdir()}
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert hub.blobs[hashlib.sha256(weights).hexdigest()] == weights
    assert "hf_secret" not in done.stdout + done.stderr


def test_a_public_repository_is_no_place_for_private_weights(tmp_path: Path, hub: Hub) -> None:
    source = models.gptq(tmp_path / "in")
    hub.private = False
    done = run("repack", source, tmp_path / "out", "--push-to-hub", "me/out", "--private", "--token", "hf_secret",
               HF_ENDPOINT=hub.address, HF_HUB_DISABLE_XET="1")  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "is public" in done.stderr
    assert "commit" not in hub.sent
    assert not (tmp_path / "out").exists()


def test_a_push_that_must_fail_fails_before_the_work(tmp_path: Path) -> None:
    source = models.gptq(tmp_path / "in")
    done = run("repack", source, tmp_path / "out", "--push-to-hub", "me/out", HF_ENDPOINT="http://127.0.0.1:9",
               HF_TOKEN="hf_x")  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert not (tmp_path / "out").exists()
    done = run("repack", source, tmp_path / "out", "--push-to-hub", "a/b/c", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2, done.stderr
