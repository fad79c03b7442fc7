"""Verbs about this project and this machine: formats, env and completion."""

from __future__ import annotations

from typing import Any

import click

from w4plugin.cli import options


@click.command()
@options.output
def formats(mode: str, quiet: bool, verbose: bool) -> None:
    """List the formats that can be read and written."""
    from w4plugin.formats import registry

    entries = [
        {
            "name": f.name,
            "title": f.title,
            "producers": f.producers,
            "writes": f.write is not None,
            "exact": f.exact,
            "suffixes": sorted(f.suffixes),
            "limits": f.limits,
        }
        for f in registry.formats().values()
    ]
    options.show({"command": "formats", "formats": entries}, mode, quiet=quiet, verbose=verbose)


@click.command()
@options.output
def env(mode: str, quiet: bool, verbose: bool) -> None:
    """Say which kernel backends run here, and why the others do not."""
    options.show(_environment(), mode, quiet=quiet, verbose=verbose)


PACKAGES = ("torch", "triton", "safetensors", "huggingface-hub", "numpy", "transformers", "vllm", "sglang")


def _environment() -> dict[str, Any]:
    import platform
    from importlib import metadata

    import torch

    from w4plugin import __version__
    from w4plugin.kernels import experts_reasons, registry
    from w4plugin.kernels.device import target

    versions: dict[str, str | None] = {"w4plugin": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    devices = []
    for name in names:
        where = target(name, torch.float16)
        backends, experts = registry.reasons(where), experts_reasons(where)
        devices.append({"device": name, "arch": where.arch, "backends": backends, "experts": experts})
    return {"command": "env", "packages": versions, "devices": devices}


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands, options and formats.

    For bash: `w4plugin completion bash >> ~/.bashrc`.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "w4plugin", "_W4PLUGIN_COMPLETE").source())
