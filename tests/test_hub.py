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
from tpshard.errors import StorageError, UsageError
from tpshard.source import open_source


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("gpt2", False),  # the few ids of this form look like any mistyped directory,
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
    refused("org/name", "no directory 'org/name'", "pip install huggingface_hub", kind=StorageError)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("GatedRepoError", ("accept", "HF_TOKEN")),
        ("RepositoryNotFoundError", ("no model org/name", "check the name", "HF_TOKEN")),
        ("RevisionNotFoundError", ("no revision v2",)),
        ("LocalEntryNotFoundError", ("not in the cache", "connection", "HF_HUB_OFFLINE", "hf download org/name")),
        ("OfflineModeIsEnabled", ("not in the cache", "HF_HUB_OFFLINE")),
        ("OSError", ("No space left", "HF_HOME")),
    ],
)
def test_every_kind_of_failure_of_the_hub_is_one_plain_sentence(
    name: str, said: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    kind = OSError if name == "OSError" else getattr(errors, name)

    def download(*_: Any, **__: Any) -> str:
        error = kind.__new__(kind)
        error.args = (28, "No space left on device") if name == "OSError" else ("Traceback of\nmany lines",)
        if name == "OSError":
            raise OSError(28, "No space left on device")
        raise error

    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, download)
    message = refused("org/name@v2", "no directory 'org/name@v2'", "local directory", *said, kind=StorageError)
    assert "Error" not in message
    assert "many lines" not in message
    assert message.count(".") <= 1 + "HF_HOME".count(".")


@pytest.mark.parametrize("name", ["gpt2", "gpt2@main", "typo", "model.safetensors"])
def test_a_name_without_a_slash_is_not_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.chdir(tmp_path)
    fake_hub(monkeypatch, download)
    message = refused(name, "org/name", kind=UsageError)
    assert message.startswith(f"There is no directory {name}.")


def test_the_folder_of_a_model_in_the_cache_names_its_snapshots(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path)
    refused(snapshot.parents[1], str(snapshot), "snapshots", kind=UsageError)
    for path in sorted(snapshot.parent.rglob("*"), reverse=True):
        path.unlink() if path.is_symlink() or path.is_file() else path.rmdir()
    refused(snapshot.parents[1], "no snapshot", "Download")


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


def test_of_a_hub_id_single_files_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(tmp_path)

    fake_hub(monkeypatch, download)
    assert hub.resolve("org/name@v1", only=("config.json",)) == tmp_path
    assert asked == [("org/name", "v1", ["config.json"])]
