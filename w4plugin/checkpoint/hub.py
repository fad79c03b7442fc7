"""A checkpoint named by its hub id: downloaded, or found in the cache, by the hub's own library.

To look at a checkpoint its headers are enough: configs are downloaded, and of each weight file only the first bytes.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from w4plugin.checkpoint.header import Header, header_length, parse_header
from w4plugin.checkpoint.source import Source, local
from w4plugin.errors import StorageError, UsageError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

NEVER_NEEDED = (
    "*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.tflite", "*.ckpt", "*.mlmodel", "*.npz",
    "original/*", "onnx/*", "coreml/*", "openvino/*",
)  # fmt: skip
"""Weights in formats this project does not read, which a repository may hold beside the ones it does."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle")
SAFETENSORS = ".safetensors"

FIRST_BYTES = 100_000
"""What is fetched of a weight file at first; most headers are shorter."""

CONNECTIONS = 8


def locate(
    model: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | None = None,
    pickles: bool = False,
    headers_only: bool = False,
) -> Source:
    """The folder of ``model``: itself when it is a folder, else a snapshot of the hub repository of that name.

    Args:
        model: a folder, or a hub id such as ``org/name``.
        revision: branch, tag or commit of a hub repository.
        cache_dir: the hub's cache; None means its usual place.
        token: for private and gated repositories; None means the one that is logged in.
        pickles: download ``.bin`` and ``.pt`` files too.
        headers_only: leave safetensors files on the hub when they are not in the cache.

    Raises:
        UsageError: neither a folder nor a repository, or a revision that does not exist.
        StorageError: the network or the disk failed, or the machine is offline and the cache does not hold it.
    """
    folder = Path(model).expanduser()
    if folder.exists() or not _REPO_ID.fullmatch(str(model)):
        if revision is not None:
            raise UsageError("--revision", got=f"a revision of {model}", wanted="a hub id, which alone has revisions")
        return local(folder)
    return _snapshot(str(model), revision, cache_dir, token, pickles, headers_only)


def _snapshot(
    repo: str, revision: str | None, cache_dir: str | Path | None, token: str | None, pickles: bool, headers_only: bool
) -> Source:
    # imported here: a local folder needs neither the library nor the second it takes to import
    import huggingface_hub as hub
    from huggingface_hub import constants

    skipped = [*NEVER_NEEDED, *(() if pickles else PICKLES)]
    with _told(f"{repo}@{revision}" if revision else repo):
        remote: set[str] = set()
        if headers_only and not constants.HF_HUB_OFFLINE:
            remote = _weights(hub.HfApi(token=token), repo, revision)
            skipped += [f"*{SAFETENSORS}"] if remote else []
        path = Path(
            hub.snapshot_download(repo, revision=revision, cache_dir=cache_dir, token=token, ignore_patterns=skipped)
        )
        there = {name for name in remote if "/" not in name and not (path / name).exists()}
        return Source(path, repo, path.name, revision, frozenset(there))


def _weights(api: Any, repo: str, revision: str | None) -> set[str]:
    """Names of the repository's safetensors files; none when the hub does not answer, since the cache may hold them."""
    from huggingface_hub import errors

    try:
        info = api.model_info(repo, revision=revision)
    except Exception as fault:
        if isinstance(fault, errors.HfHubHTTPError) or not isinstance(fault, (OSError, _transport())):
            raise  # an answer, or something that is not the network
        return set()
    return {s.rfilename for s in info.siblings or () if s.rfilename.endswith(SAFETENSORS)}


def fetch_headers(source: Source, names: list[str], token: str | None) -> dict[str, Header]:
    """Headers of weight files that lie on the hub, by a few bytes of each.

    Raises:
        CorruptError: a header contradicts the size that the hub tells.
        StorageError: the network failed.
    """
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return dict(zip(names, pool.map(lambda name: _header(source, name, token), names), strict=True))


def _header(source: Source, name: str, token: str | None) -> Header:
    raw, size = _begin(source, name, FIRST_BYTES, token)
    length = 8 + header_length(name, raw[:8], size)
    if length > len(raw):
        raw, size = _begin(source, name, length, token)
    return parse_header(source.folder / name, raw[:length], size)


def _begin(source: Source, name: str, count: int, token: str | None) -> tuple[bytes, int]:
    """The first ``count`` bytes of a file on the hub, and how long it is."""
    return _part(source, name, 0, count, token)


def fetch_part(source: Source, name: str, start: int, stop: int, token: str | None = None) -> bytes:
    """Bytes ``start:stop`` of a weight file that lies on the hub, for the few small tensors that a decision hangs on.

    Raises:
        StorageError: the network failed, or the hub sent something else.
    """
    found, _ = _part(source, name, start, stop - start, token)
    if len(found) != stop - start:
        wanted = f"{stop - start} from {start} on"
        raise StorageError(f"{source.label()}: {name}", got=f"{len(found)} bytes", wanted=wanted)
    return found


def _part(source: Source, name: str, start: int, count: int, token: str | None) -> tuple[bytes, int]:
    """``count`` bytes of a file on the hub from ``start`` on, and how long it is."""
    import huggingface_hub as hub

    assert source.repo is not None
    utils: Any = importlib.import_module("huggingface_hub.utils")  # it names its exports for no type checker
    url = hub.hf_hub_url(source.repo, name, revision=source.commit)
    headers = {**utils.build_hf_headers(token=token), "range": f"bytes={start}-{start + count - 1}"}
    with _told(f"{source.label()}: {name}"), utils.get_session().stream("GET", url, headers=headers) as answer:
        utils.hf_raise_for_status(answer)
        if start and answer.status_code != 206:
            raise OSError("the hub sent a whole file where a part of it was asked for")
        found = bytearray()
        for block in answer.iter_bytes():  # a server that knows no ranges would send the whole file
            found += block
            if len(found) >= count:
                break
        return bytes(found[:count]), _size(answer.headers)


def _size(headers: Any) -> int:
    """The whole file's length, which an answer to a range gives after a slash."""
    text = str(headers.get("content-range", "")).rpartition("/")[2] or str(headers.get("content-length", ""))
    return int(text) if text.isdigit() else 0


def _transport() -> type:
    """The base error of the http client that the hub's library was built for, which varies with its version."""
    from huggingface_hub import errors

    return errors.HfHubHTTPError.__mro__[1]


@contextmanager
def _told(where: str) -> Iterator[None]:
    """The hub library's errors as ours."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as fault:
        raise StorageError(
            where, got="a gated repository", wanted="access to it", todo="Accept its terms on the hub and pass --token."
        ) from fault
    except errors.RevisionNotFoundError as fault:
        raise UsageError(
            where, got="no such revision", wanted="a branch, tag or commit", todo="See its branches on the hub."
        ) from fault
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as fault:
        raise UsageError(
            where,
            got="no such folder and no such repository",
            wanted="a folder, or a hub id like org/name",
            todo="A private repository needs --token.",
        ) from fault
    except errors.LocalEntryNotFoundError as fault:
        raise StorageError(
            where,
            got="not in the cache, and the hub cannot be reached",
            wanted="a downloaded snapshot, or a network",
            todo="HF_HUB_OFFLINE=1 forbids the network; --cache-dir names another cache.",
        ) from fault
    except Exception as fault:
        if not isinstance(fault, (OSError, _transport(), errors.XetDownloadError)):
            raise
        first = str(fault).strip().splitlines()
        raise StorageError(
            where,
            got=first[0] if first else type(fault).__name__,
            wanted="an answer of the hub",
            todo="Run the same command again: what has arrived is kept.",
        ) from fault
