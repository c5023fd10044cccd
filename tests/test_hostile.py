"""2,040 malformed files a run: plain errors, bounded work, nothing touched outside, no code run.

Every example is judged the same way: what the library raises is one of its own errors, it takes little time, and
Python's audit events show that nothing is opened for writing but the output, nothing read but the input and what
Python itself loads, no process started and nothing unpickled.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import pickletools
import resource
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from commands import tpshard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights import CONFIG, Tensor, tree, write_llama

from tpshard import inspect, merge, reshard, split, verify
from tpshard.errors import DamagedError, StorageError, TpshardError, UnsupportedError, UsageError
from tpshard.manifest import checksum
from tpshard.options import Options

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(600)
from torchsaves import PLAIN, PLAIN_LEGACY, framed  # noqa: E402

FEW, MANY = 60, 510  # examples of each of the four kinds
SECONDS = 2.0  # of processor time, that one may take at most

# -- what is watched ---------------------------------------------------------------------------

_WATCHED: list[tuple[str, tuple[Any, ...]]] | None = None
_ALWAYS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class", "socket.connect",
)  # fmt: skip
_LOADED = (".py", ".pyc", ".so", ".pth", "METADATA", "PKG-INFO", "entry_points.txt")  # by Python itself
_PLACES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _WATCHED is not None and (event in _ALWAYS or event in _PLACES):
        _WATCHED.append((event, args))


sys.addaudithook(_audit)


@contextmanager
def watched(*folders: Path) -> Iterator[None]:
    """Whatever is done in here touches nothing outside of ``folders``, starts nothing, and unpickles nothing."""
    global _WATCHED
    allowed = [os.path.realpath(folder) + os.sep for folder in folders]
    _WATCHED = seen = []
    try:
        yield
    finally:
        _WATCHED = None
    for event, args in seen:
        assert event not in _ALWAYS, (event, args)
        for arg in args[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
            if not isinstance(arg, (str, bytes, os.PathLike)) or not os.path.isabs(os.fspath(arg)):
                continue  # relative to a directory that is held open, while one of the allowed is walked
            path = os.path.realpath(os.fsdecode(arg))
            writes = event != "open" or bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            ours = any((path + os.sep).startswith(folder) for folder in allowed)
            python = path.startswith((os.path.realpath(sys.prefix), sys.base_prefix, "/usr/lib", "/proc/"))
            assert ours or (not writes and (python or path.endswith(_LOADED))), (event, args)


def judged(attempt: Callable[[], object], *folders: Path) -> bool:
    """Whether it was refused; with one of our errors, in bounded time, and nothing else touched."""
    begun = time.process_time()
    with watched(*folders):
        try:
            attempt()
        except TpshardError as error:
            assert isinstance(error, (DamagedError, UnsupportedError, UsageError, StorageError)), error
            assert 10 < len(str(error)) < 5000
            refused = True
        else:
            refused = False
    assert time.process_time() - begun < SECONDS
    return refused


def many(kind: str, strategy: st.SearchStrategy[Any], check: Callable[[Any], bool], count: int) -> None:
    """Run ``count`` examples, most of which must be refused; the memory of the process stays as it is."""
    tried: list[bool] = []

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(example: Any) -> None:
        tried.append(check(example))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(f"{kind}: {len(tried)} examples, {sum(tried)} refused, {grown} MiB grown")
    assert len(tried) >= count
    assert sum(tried) > 0.7 * len(tried)
    assert grown < 300


# -- strategies --------------------------------------------------------------------------------

NASTY = st.sampled_from(
    ["../../../etc/passwd", "/etc/passwd", "a/../../b", "..", ".", "", "\0", "a\0b", "C:\\x", "x" * 5000, "\ud800", "-",
     "tpshard.json", "config.json", "model.safetensors/", "//", "~/.ssh/id_rsa", "nul", "\u202e", "a\nb", "%s%n", "{0}"]
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63, 2**63 - 1, 2**64, 10**39])
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), NASTY, st.text(max_size=12))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | NASTY, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


def leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything stands in a JSON document."""
    if path:
        yield path
    held = isinstance(document, list)
    items = document.items() if isinstance(document, dict) else enumerate(document) if held else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def put(document: Any, path: tuple[Any, ...], value: Any, how: str) -> None:
    """Set, remove, rename or double what stands at a place; a place that is gone by now is left."""
    try:
        for key in path[:-1]:
            document = document[key]
        if how == "remove":
            del document[path[-1]]
        elif how == "rename" and isinstance(document, dict):
            document[value if isinstance(value, str) else str(value)] = document.pop(path[-1])
        else:
            document[path[-1]] = value
    except (KeyError, IndexError, TypeError):
        return


def mangled(document: Any) -> st.SearchStrategy[Any]:
    """The document with one to three things in it changed."""
    places = list(leaves(document))
    change = st.tuples(st.sampled_from(places), VALUES, st.sampled_from(["set", "set", "remove", "rename"]))

    def apply(changes: list[tuple[tuple[Any, ...], Any, str]]) -> Any:
        copy = deepcopy(document)
        for path, value, how in changes:
            put(copy, path, value, how)
        return copy

    return st.lists(change, min_size=1, max_size=3).map(apply)


def text_of(document: Any) -> bytes:
    return json.dumps(document).encode()


def scarred(raw: bytes) -> st.SearchStrategy[bytes]:
    """Bytes cut short, flipped, doubled, or with something put between."""
    at = st.integers(0, len(raw) - 1)
    return st.one_of(
        at.map(lambda n: raw[:n]),
        st.tuples(at, st.integers(1, 255)).map(lambda c: raw[: c[0]] + bytes([raw[c[0]] ^ c[1]]) + raw[c[0] + 1 :]),
        st.tuples(at, st.binary(min_size=1, max_size=30)).map(lambda c: raw[: c[0]] + c[1] + raw[c[0] :]),
        st.tuples(at, at).map(lambda c: raw[: max(c)] + raw[min(c) :] if c[0] != c[1] else raw[:-1]),
        st.binary(max_size=300),
    )


# -- the four kinds ----------------------------------------------------------------------------


@pytest.fixture(params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def count(request: pytest.FixtureRequest) -> int:
    """How many examples: some in every run, 2,040 of all kinds with ``-m slow``."""
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model of one thin layer, so that an example is quick; warmed up, so that no import counts as one."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 8, "intermediate_size": 4, "vocab_size": 5, "num_hidden_layers": 1}
    made = write_llama(folder / "model", files=2, **heads, **sizes)
    split(made, folder / "warm", 2)
    for attempt in (lambda: verify(folder / "warm", against=made), lambda: merge(folder / "warm", folder / "merged")):
        attempt()
    inspect(made)
    inspect(folder / "warm")
    return made


def tried(source: Path, out: Path, folder: Path) -> bool:
    """A checkpoint is looked at and split; the output is whole or not there."""
    shutil.rmtree(out, ignore_errors=True)
    refused = judged(lambda: inspect(source), folder)
    assert judged(lambda: split(source, out, 2), folder) or not refused
    if out.exists():
        assert (out / "tpshard.json").exists()
    assert not out.with_name(f"{out.name}.tpshard-partial").exists()
    return refused


def test_headers(model: Path, folder: Path, count: int) -> None:
    source, out = Path(shutil.copytree(model, folder / "headers")), folder / "headers-out"
    victim = source / "model-00001-of-00002.safetensors"
    raw = victim.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    whole = mangled(header).map(lambda d: len(text_of(d)).to_bytes(8, "little") + text_of(d) + data)
    lengths = NUMBERS.map(lambda n: (n % 2**64).to_bytes(8, "little") + raw[8:])
    deep = st.sampled_from([b"[" * n + b"]" * n for n in (50, 5000, 90_000)]) | st.sampled_from(
        [b'{"a":' * n + b"1" + b"}" * n for n in (50, 5000)]
    )
    twice = st.sampled_from(sorted(header)).map(
        lambda name: text_of(header)[:-1] + b"," + text_of({name: header[name]})[1:]
    )
    bombs = st.sampled_from([b"{" + b" " * 300_000 + b"}", b'{"a":' + b"9" * 60_000 + b"}", b'{"' + b"\\u0061" * 9999])
    texts = (deep | twice | bombs).map(lambda text: len(text).to_bytes(8, "little") + text + data)

    def check(example: bytes) -> bool:
        victim.write_bytes(example)
        return tried(source, out, folder)

    many("headers", st.one_of(whole, whole, lengths, scarred(raw[: 8 + length + 40]), texts), check, count)


def test_indexes(model: Path, folder: Path, count: int) -> None:
    source, out = Path(shutil.copytree(model, folder / "indexes")), folder / "indexes-out"
    index, config = source / "model.safetensors.index.json", source / "config.json"
    raw, kept = index.read_bytes(), config.read_bytes()
    document = json.loads(raw)
    (source.parent / "outside.safetensors").write_bytes((model / "model-00001-of-00002.safetensors").read_bytes())
    names = st.sampled_from(
        ["../outside.safetensors", str(source.parent / "outside.safetensors"), "sub/../../outside.safetensors"]
    )
    led_out = st.tuples(st.sampled_from(sorted(document["weight_map"])), names).map(
        lambda change: text_of({**document, "weight_map": {**document["weight_map"], change[0]: change[1]}})
    )
    configs = mangled(CONFIG).map(lambda d: (b"", text_of(d))) | scarred(kept).map(lambda b: (b"", b))
    indexes = st.one_of(mangled(document).map(text_of), scarred(raw), led_out).map(lambda b: (b, b""))

    def check(example: tuple[bytes, bytes]) -> bool:
        index.write_bytes(example[0] or raw)
        config.write_bytes(example[1] or kept)
        refused = tried(source, out, folder)
        return refused or bool(example[1])  # much of a config may be another and still be one

    many("indexes and configs", st.one_of(indexes, indexes, configs), check, count)


def test_manifests(model: Path, folder: Path, count: int) -> None:
    shards = folder / "manifests"
    split(model, shards, 2)
    path = shards / "tpshard.json"
    raw = path.read_bytes()
    document = json.loads(raw)
    out = folder / "manifests-out"

    def sealed(changed: Any) -> bytes:
        """As if tpshard itself had written it: what is refused then is refused for what it says."""
        try:
            return text_of({**changed, "checksum": checksum(changed)})
        except (TypeError, ValueError, RecursionError, AttributeError):
            return text_of(changed)

    bomb = base64.b64encode(zlib.compress(b" " * (1 << 24), 9)).decode()
    bombs = st.sampled_from([("source", "index", "bytes"), ("source", "files", 0, "frame", 0, "bytes")])

    def bombed(place: tuple[Any, ...]) -> bytes:
        copy = deepcopy(document)
        put(copy, place, bomb, "set")
        return sealed(copy)

    files = [p for p in leaves(document) if p[0] in ("files", "side_files") or p[:2] == ("source", "files")]
    named = st.tuples(st.sampled_from([p for p in files if p[-1] in ("name", "path")]), NASTY)

    def renamed(change: tuple[tuple[Any, ...], str]) -> bytes:
        copy = deepcopy(document)
        put(copy, change[0], change[1], "set")
        return sealed(copy)

    attempts = itertools.cycle(
        [lambda: merge(shards, out), lambda: reshard(shards, out, 1), lambda: verify(shards, levels=["digest"])]
    )

    def check(example: bytes) -> bool:
        path.write_bytes(example)
        refused = judged(lambda: inspect(shards), folder)
        judged(next(attempts), folder)
        shutil.rmtree(out, ignore_errors=True)
        return refused

    whole = mangled(document)
    many(
        "manifests", st.one_of(whole.map(sealed), whole.map(sealed), whole.map(text_of), scarred(raw),
        named.map(renamed), bombs.map(bombed)), check,
        count,
    )  # fmt: skip


GLOBALS = st.sampled_from(
    ["os\nsystem", "builtins\neval", "builtins\nexec", "builtins\ngetattr", "subprocess\nPopen", "torch\nload",
     "torch._utils\n_rebuild_tensor_v2", "torch\nFloatStorage", "collections\nOrderedDict", "builtins\n__import__",
     "torch.serialization\nload", "pickle\nloads", "numpy.core.multiarray\n_reconstruct", "_codecs\nencode", "\n"]
).map(lambda name: b"c" + name.encode() + b"\n")  # fmt: skip
OPCODES = st.sampled_from([op.code.encode("latin1") for op in pickletools.opcodes])


def test_pickles(folder: Path, count: int) -> None:
    """Random programs of every opcode, archives and the older format with bytes changed."""
    assert (folder / "marker").exists() is False
    source = folder / "pickles"
    write_llama(source, num_hidden_layers=1)
    (source / "model.safetensors").unlink()
    victim, out = source / "pytorch_model.bin", folder / "pickles-out"
    small = st.integers(0, 255).map(lambda n: bytes([n]))
    call = GLOBALS.flatmap(
        lambda name: st.sampled_from([b"mkdir marker", b"../../../etc/passwd"]).map(
            lambda text: name + b"X" + len(text).to_bytes(4, "little") + text + b"\x85R"
        )
    )
    part = st.one_of(
        OPCODES, st.tuples(OPCODES, small).map(b"".join), st.tuples(OPCODES, st.binary(max_size=8)).map(b"".join),
        GLOBALS, call,
        st.sampled_from([b"K\x00", b"X\x01\x00\x00\x00a", b"(", b"]", b"}", b")", b"q\x00", b"h\x00", b"N"]),
    )  # fmt: skip
    programs = st.tuples(
        st.sampled_from([b"\x80\x02", b"\x80\x04", b"", b"\x80\x05"]), st.lists(part, max_size=30).map(b"".join)
    ).map(lambda c: c[0] + c[1] + b".")
    framings = st.tuples(programs, st.booleans()).map(lambda c: framed(c[0], legacy=c[1]))

    def compressed(level: int) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(PLAIN)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
            for info in old.infolist():
                new.writestr(info.filename, old.read(info) + bytes(level << 20), compresslevel=9)
        return buffer.getvalue()

    bombs = st.sampled_from([compressed(0), compressed(16)])

    def check(example: bytes) -> bool:
        victim.write_bytes(example)
        return tried(source, out, folder)

    many("pickles", st.one_of(framings, framings, scarred(PLAIN), scarred(PLAIN_LEGACY), bombs), check, count)


# -- by hand -----------------------------------------------------------------------------------


def test_the_watch_sees_what_it_must(tmp_path: Path) -> None:
    import pickle

    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("x")
    for attempt in (
        lambda: (tmp_path / "secret").read_text(),
        lambda: (tmp_path / "other").write_text("x"),
        lambda: (tmp_path / "dir").mkdir(),
        lambda: pickle.loads(pickle.dumps(Path("x"))),
        lambda: os.system("true"),
    ):
        with pytest.raises(AssertionError), watched(tmp_path / "in"):
            attempt()
    with watched(tmp_path / "in"):
        (tmp_path / "in" / "x").write_text("x")


@pytest.mark.parametrize("where", ["absolute", "relative", "through a directory"])
def test_side_files_do_not_lead_out(where: str, tmp_path: Path) -> None:
    """A checkpoint from a stranger may hold a link to one of the user's own files, which is not to be published."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "id_rsa").write_text("PRIVATE")
    source, out = write_llama(tmp_path / "model"), tmp_path / "out"
    link = source / "notes.txt"
    target = {"absolute": tmp_path / "home" / "id_rsa", "relative": Path("../home/id_rsa")}
    if where == "through a directory":
        shards = tmp_path / "shards"
        (source / "sub").mkdir()
        (source / "sub" / "id_rsa").write_text("PRIVATE")
        split(source, shards, 2)
        shutil.rmtree(shards / "sub")
        (shards / "sub").symlink_to(tmp_path / "home")
        attempts = [lambda: merge(shards, out), lambda: reshard(shards, out, 1, options=Options(allow_changed=True))]
    else:
        link.symlink_to(target[where])
        attempts = [lambda: split(source, out, 2), lambda: split(source, out, 2, options=Options(dry_run=True))]
    for attempt in attempts:
        with pytest.raises(DamagedError, match=r"id_rsa.*leads out|leads out.*id_rsa"):
            attempt()
        assert not out.exists()


def test_links_inside_and_in_a_hub_cache_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    source = write_llama(cache / "snapshots" / ("a" * 40))
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(cache / "blobs" / str(number))
        path.symlink_to(Path("../../blobs") / str(number))
    (source / "again.json").symlink_to("tokenizer.json")
    split(source, tmp_path / "out", 2)
    assert (tmp_path / "out" / "again.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_weights_that_lead_elsewhere_must_be_weights(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "model")
    (tmp_path / "secret").write_text("PRIVATE" * 1000)
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to(tmp_path / "secret")
    done = tpshard("split", source, tmp_path / "out", "--tp", 2)
    assert done.status == 4
    assert "PRIVATE" not in done.err
    assert not (tmp_path / "out").exists()


def test_names_of_tensors_lead_nowhere(tmp_path: Path) -> None:
    """Tensors are not files: whatever a name looks like, it is a key in a header."""
    names = ("../../evil", "/etc/passwd", "a\\b", "\u202egnp.exe", "x" * 9000)
    extra = {name: Tensor("U8", (3,), b"abc") for name in names}
    source = write_llama(tmp_path / "model", extra=extra)
    before = set(tmp_path.rglob("*"))
    done = tpshard("split", source, tmp_path / "out", "--tp", 2)
    assert done.status == 3
    assert set(tmp_path.rglob("*")) == before
    done = tpshard("split", source, tmp_path / "out", "--tp", 2, "--copy-unknown")
    assert done.status == 0
    assert set(os.listdir(tmp_path)) == {"model", "out"}
    merge(tmp_path / "out", tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(source)
