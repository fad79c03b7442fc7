"""A finished output folder to the hub, in one commit."""

from __future__ import annotations

from pathlib import Path

from w4plugin.errors import StorageError, UsageError


def require_repo(repo: str, *, private: bool, token: str | None) -> None:
    """Create the repository, or find that it exists, before the work begins.

    Raises:
        UsageError: no repository can have that name, or a private one is wanted and a public one exists.
        StorageError: the hub refuses, or cannot be reached.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        api = hub.HfApi(token=token)
        full = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        public = private and not api.model_info(full).private
    except errors.HFValidationError as fault:
        raise UsageError("--push-to-hub", got=repr(repo), wanted="a repository like name or org/name") from fault
    except Exception as fault:
        raise _failed(repo, fault) from fault
    if public:
        raise UsageError(
            f"--push-to-hub {repo}",
            got="a repository that exists and is public",
            wanted="a private one, as --private says",
            todo="Name another, or leave --private out.",
        )


def push(folder: Path, repo: str, *, token: str | None) -> str:
    """Upload everything in ``folder``; returns the address of the commit.

    Raises:
        StorageError: the hub refuses, or cannot be reached; the folder stays as it is.
    """
    import huggingface_hub as hub

    try:
        done = hub.HfApi(token=token).upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload a checkpoint written by w4plugin"
        )
    except Exception as fault:
        raise _failed(repo, fault) from fault
    return str(done.commit_url)


def _failed(repo: str, fault: Exception) -> StorageError:
    """The hub's library fails with errors of its http client, of its own and of the operating system."""
    lines = str(fault).strip().splitlines()
    return StorageError(
        f"hub repository {repo}",
        got=lines[0] if lines else type(fault).__name__,
        wanted="to write to it",
        todo="Check the network and the token; the output folder stays.",
    )
