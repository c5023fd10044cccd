"""Hub ids: ``name`` or ``org/name``, optionally ``@revision``, resolved to a local snapshot."""

from __future__ import annotations

import re
from pathlib import Path

from tpshard.errors import StorageError

_ID = re.compile(r"(?P<repo>(?:[A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

# Everything but other formats of the weights: what a family carries beside its weights has no fixed list.
_ANY_WEIGHTS = ("*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.tflite", "*.ot")
_LEFT = (*_ANY_WEIGHTS, "*.npz", "original/*", "onnx/*", "consolidated*.safetensors", "*.msgpack.index.json")
_BIN = ("*.bin", "*.bin.index.json")


def looks_like_id(text: str) -> bool:
    """Whether ``text`` can be a hub id: ``name`` or ``org/name``, then ``@revision`` or nothing."""
    match = _ID.fullmatch(text)
    if match is None:
        return False
    repo = match["repo"]
    return len(repo) <= 96 and "--" not in repo and ".." not in repo and not repo.endswith((".", ".git"))


def resolve(repo_id_at_revision: str) -> Path:
    """The local snapshot of ``org/name`` or ``org/name@revision``, downloaded or from the cache.

    Offline (``HF_HUB_OFFLINE=1``, or no connection) the cache serves. Of the weights only safetensors
    files are fetched, or ``pytorch_model.bin`` where there are none. Whatever fails raises
    :class:`StorageError` naming id and revision.
    """
    match = _ID.fullmatch(repo_id_at_revision)
    if match is None:
        raise StorageError(f"{repo_id_at_revision!r:.200} is not a hub id of the form org/name or org/name@revision.")
    repo, revision = match["repo"], match["revision"]
    shown = f"{repo} (revision {revision or 'main'})"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise StorageError(
            f"There is no directory {repo_id_at_revision!r}, and looking it up as a hub id needs the package "
            "huggingface_hub: pip install huggingface_hub, or give a local directory."
        ) from None
    try:
        root = Path(snapshot_download(repo, revision=revision, ignore_patterns=[*_LEFT, *_BIN]))
        if not any(root.glob("*.safetensors")):
            root = Path(snapshot_download(repo, revision=revision, ignore_patterns=[*_LEFT]))
    except Exception as error:  # the library raises its own, its HTTP client's and plain OSErrors alike
        first = str(error).strip().split("\n", 1)[0][:300]
        raise StorageError(
            f"There is no directory {repo_id_at_revision!r}, and as a hub id, {shown} could not be had: "
            f"{type(error).__name__}: {first}. Check the name and the connection; a private or gated model needs a "
            f"token (HF_TOKEN); for offline use, fetch it first with `hf download {repo}` and set "
            "HF_HUB_OFFLINE=1; or give a local directory."
        ) from None
    return root
