"""Hub ids: ``org/name``, optionally ``@revision``, resolved to a local snapshot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tpshard.errors import StorageError, UsageError

_ID = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

# Everything but other formats of the weights: what a family carries beside its weights has no fixed list.
_ANY_WEIGHTS = ("*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.tflite", "*.ot")
_LEFT = (*_ANY_WEIGHTS, "*.npz", "original/*", "onnx/*", "consolidated*.safetensors", "*.msgpack.index.json")
_BIN = ("*.bin", "*.bin.index.json")


def looks_like_id(text: str) -> bool:
    """Whether ``text`` can be a hub id: ``org/name``, then ``@revision`` or nothing.

    The few ids without an organisation are left out: a mistyped directory shall not be looked for on the network.
    """
    match = _ID.fullmatch(text)
    if match is None:
        return False
    repo = match["repo"]
    return len(repo) <= 96 and "--" not in repo and ".." not in repo and not repo.endswith((".", ".git"))


def resolve(repo_id_at_revision: str, *, only: Sequence[str] = ()) -> Path:
    """The local snapshot of ``org/name`` or ``org/name@revision``, downloaded or from the cache.

    Offline (``HF_HUB_OFFLINE=1``, or no connection) the cache serves. Of the weights only safetensors
    files are fetched, or ``pytorch_model.bin`` where there are none; with ``only`` those files and nothing
    else. What the hub or the network refuses raises :class:`StorageError` naming id and revision, what is
    no id :class:`UsageError`.
    """
    match = _ID.fullmatch(repo_id_at_revision)
    if match is None:
        raise UsageError(f"{repo_id_at_revision!r:.200} is not a hub id of the form org/name or org/name@revision.")
    repo, revision = match["repo"], match["revision"]
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise StorageError(
            f"There is no directory {repo_id_at_revision!r}, and looking it up as a hub id needs the package "
            "huggingface_hub: pip install huggingface_hub, or give a local directory."
        ) from None
    try:
        if only:
            return Path(snapshot_download(repo, revision=revision, allow_patterns=[*only]))
        root = Path(snapshot_download(repo, revision=revision, ignore_patterns=[*_LEFT, *_BIN]))
        if not any(root.glob("*.safetensors")):
            root = Path(snapshot_download(repo, revision=revision, ignore_patterns=[*_LEFT]))
    except Exception as error:  # the library raises its own, its HTTP client's and plain OSErrors alike
        raise StorageError(
            f"There is no directory {repo_id_at_revision!r}, and {_why(error, repo, revision or 'main')}; or give a "
            "local directory."
        ) from None
    return root


def _why(error: Exception, repo: str, revision: str) -> str:
    """What kept a model from being fetched and what to do about it, in a sentence without end.

    Errors are told by the names of their classes, which have moved between the library's modules.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError) and error.errno is not None:
        return f"{repo} could not be stored in the hub's cache: {error.strerror}: make room, or set HF_HOME"
    if "GatedRepoError" in kinds:
        return f"the hub gives {repo} only to those who accepted its terms: accept them, and set HF_TOKEN to your token"
    if "RepositoryNotFoundError" in kinds:
        return f"the hub has no model {repo} that you may see: check the name; a private one needs a token (HF_TOKEN)"
    if "RevisionNotFoundError" in kinds:
        return f"the hub's model {repo} has no revision {revision}: check what follows the @"
    if "LocalEntryNotFoundError" in kinds or "OfflineModeIsEnabled" in kinds or "ConnectionError" in kinds:
        return (
            f"the hub's model {repo} (revision {revision}) is not in the cache and the hub is out of reach: check the "
            f"connection and HF_HUB_OFFLINE, fetch it with `hf download {repo}` where there is one"
        )
    first = str(error).strip().split("\n", 1)[0][:300].rstrip(".") or "no reason was given"
    return (
        f"the hub's model {repo} (revision {revision}) could not be had ({first}): check the name and the connection; "
        "a private or gated model needs a token (HF_TOKEN)"
    )
