"""Hub ids: what looks like one, and how it is resolved without and with a cache."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    make_cache,
    make_single,
    refused,
)

from tpshard import hub
from tpshard.errors import StorageError
from tpshard.source import open_source


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("gpt2", True),
        ("org/name", True),
        ("org/na.me-1_b@refs/pr/3", True),
        ("org/name@v1.0", True),
        ("./org/name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("..", False),
        (".", False),
        ("org/na me", False),
        ("~/x", False),
        ("org\\name", False),
        ("", False),
        ("modèle", False),
        ("a--b", False),
    ],
)
def test_what_looks_like_a_hub_id(text: str, is_id: bool) -> None:
    assert hub.looks_like_id(text) is is_id


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_id_is_resolved_where_no_such_directory_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_cache(tmp_path)
    asked: list[tuple[str, str | None]] = []

    def download(repo: str, *, revision: str | None, ignore_patterns: list[str]) -> str:
        asked.append((repo, revision))
        assert "*.bin" in ignore_patterns
        return str(root)

    fake_hub(monkeypatch, download)
    monkeypatch.chdir(tmp_path)
    source = open_source("org/name@v2")
    assert (source.root, source.label, asked) == (root, "org/name@v2", [("org/name", "v2")])
    make_single(tmp_path / "org" / "name")
    assert open_source("org/name").root == Path("org/name")  # what lies here comes first
    assert len(asked) == 1


def test_without_safetensors_on_the_hub_the_older_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: list[list[str]] = []

    def download(repo: str, *, revision: str | None, ignore_patterns: list[str]) -> str:
        patterns.append(ignore_patterns)
        return str(tmp_path)

    fake_hub(monkeypatch, download)
    assert hub.resolve("org/name") == tmp_path
    assert ["*.bin" in asked for asked in patterns] == [True, False]


def test_a_hub_that_fails_gives_one_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise RuntimeError("401 Client Error\nand a long story")

    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, download)
    message = refused("org/name@v2", "org/name", "v2", "401 Client Error", "HF_TOKEN", kind=StorageError)
    assert "long story" not in message
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("gpt2", "no directory 'gpt2'", "pip install huggingface_hub", kind=StorageError)


def test_the_hub_cache_serves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    snapshot = make_cache(tmp_path / "cache")
    commit = "0123456789012345678901234567890123456789"
    snapshot.rename(snapshot.parent / commit)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert len(open_source("org/name").files) == 7
    refused("org/other", "org/other", "hf download org/other", kind=StorageError)
