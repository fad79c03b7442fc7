"""Repack a hub model into GPTQ v2, prove that no weight changed, and upload it if you say where to.

    python examples/repack_from_hub.py ORG/NAME OUT [REPO]

Without weights on the disk this downloads them into the hub's cache, once. REPO needs a token (`hf auth login`).
The same on the command line: w4plugin repack ORG/NAME OUT --push-to-hub REPO
"""

from __future__ import annotations

import sys
from pathlib import Path

import w4plugin
from w4plugin.checkpoint import upload


def main(model: str, out: Path, repo: str | None = None) -> None:
    if repo:
        upload.require_repo(repo, private=False, token=None)  # before the work, not after it
    checkpoint = w4plugin.open(model)
    print(f"{checkpoint.source.label()}: {len(checkpoint.modules)} packed modules, {len(checkpoint.headers)} tensors")

    w4plugin.repack(checkpoint, out)
    proof = w4plugin.verify(checkpoint, out)
    print(f"verified: {proof['ok']} ({proof['modules']} modules, {proof['plain_tensors']} other tensors)")
    assert proof["ok"], proof["mismatches"]

    print((out / "README.md").read_text().split("\n\n")[1])  # the model card says where it comes from
    if repo:
        print("uploaded:", upload.push(out, repo, token=None))


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
