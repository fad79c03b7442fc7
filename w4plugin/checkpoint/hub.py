"""A checkpoint named by its hub id: downloaded, or found in the cache, by the hub's own library."""

from __future__ import annotations

import re
from pathlib import Path

from w4plugin.checkpoint.source import Source, local
from w4plugin.errors import StorageError, UsageError

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

NEVER_NEEDED = (
    "*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.tflite", "*.ckpt", "*.mlmodel", "*.npz",
    "original/*", "onnx/*", "coreml/*", "openvino/*",
)  # fmt: skip
"""Weights in formats this project does not read, which a repository may hold beside the ones it does."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle")


def locate(
    model: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | None = None,
    pickles: bool = False,
) -> Source:
    """The folder of ``model``: itself when it is a folder, else a snapshot of the hub repository of that name.

    Args:
        model: a folder, or a hub id such as ``org/name``.
        revision: branch, tag or commit of a hub repository.
        cache_dir: the hub's cache; None means its usual place.
        token: for private and gated repositories; None means the one that is logged in.
        pickles: download ``.bin`` and ``.pt`` files too.

    Raises:
        UsageError: neither a folder nor a repository, or a revision that does not exist.
        StorageError: the network or the disk failed, or the machine is offline and the cache does not hold it.
    """
    folder = Path(model).expanduser()
    if folder.exists() or not _REPO_ID.fullmatch(str(model)):
        if revision is not None:
            raise UsageError("--revision", got=f"a revision of {model}", wanted="a hub id, which alone has revisions")
        return local(folder)
    return _snapshot(str(model), revision, cache_dir, token, pickles)


def _snapshot(
    repo: str, revision: str | None, cache_dir: str | Path | None, token: str | None, pickles: bool
) -> Source:
    # imported here: a local folder needs neither the library nor the second it takes to import
    import huggingface_hub as hub
    from huggingface_hub import errors

    where = f"{repo}@{revision}" if revision else repo
    # the hub library's own errors derive from the base error of the http client it was built for, which varies
    transport = errors.HfHubHTTPError.__mro__[1]
    skipped = [*NEVER_NEEDED, *(() if pickles else PICKLES)]
    try:
        path = hub.snapshot_download(repo, revision=revision, cache_dir=cache_dir, token=token, ignore_patterns=skipped)
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
            where, got="no such folder and no such repository", wanted="a folder, or a hub id like org/name",
            todo="A private repository needs --token.",
        ) from fault  # fmt: skip
    except errors.LocalEntryNotFoundError as fault:
        raise StorageError(
            where, got="not in the cache, and the hub cannot be reached", wanted="a downloaded snapshot, or a network",
            todo="HF_HUB_OFFLINE=1 forbids the network; --cache-dir names another cache.",
        ) from fault  # fmt: skip
    except Exception as fault:
        if not isinstance(fault, (OSError, transport, errors.XetDownloadError)):
            raise
        first = str(fault).strip().splitlines()
        raise StorageError(
            where, got=first[0] if first else type(fault).__name__, wanted="a complete download",
            todo="Run the same command again: what has arrived is kept.",
        ) from fault  # fmt: skip
    return Source(Path(path), repo, Path(path).name, revision)
