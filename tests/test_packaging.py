"""What an installed tpshard holds and imports: the wheel, the import rules, the direction of dependencies."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import tpshard
from tpshard import registry

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "tpshard"
CONVERTERS = ROOT / "converters"

NEVER = {"torch", "transformers", "safetensors"}
LATE = {"numpy", "tqdm", "huggingface_hub"}

PLAN_MAY_IMPORT = {
    "__future__", "bisect", "collections", "contextlib", "dataclasses", "functools", "gc", "hashlib",
    "heapq", "itertools", "json", "math", "operator", "re", "types", "typing",
}  # fmt: skip
CONVERTERS_MAY_IMPORT = {"table", "axes", "config", "errors", "intervals", "blocks", "registry"}

ENGINES_MAY_IMPORT = {"errors", "exporting", "intervals", "config", "header", "converters"}

# --- what is imported ------------------------------------------------------------------------------------------------


def imported_by(code: str, *arguments: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded when ``code`` has run."""
    report = (
        "import atexit, json, sys; atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))"
    )
    # From elsewhere than the clone: `-c` puts the current folder on the path, and there tpshard lacks its converters.
    done = subprocess.run(
        [sys.executable, "-c", f"{report}\n{code}", *arguments],
        cwd=sys.prefix,
        capture_output=True,
        text=True,
        timeout=60,
    )
    *messages, modules = done.stderr.splitlines()
    assert done.returncode == 0, "\n".join(messages)
    return {name.partition(".")[0] for name in json.loads(modules)}


RUN = "from tpshard.cli import main; main()"


def test_import_is_light() -> None:
    assert not imported_by("import tpshard") & (NEVER | LATE | {"click"})


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("split", "--help"), ("list", "families")])
def test_asking_for_help_is_light(arguments: tuple[str, ...]) -> None:
    assert not imported_by(RUN, *arguments) & (NEVER | LATE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packaging") / "tiny"
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "make_checkpoint.py"), "tiny", str(out)], check=True)
    return out


def test_conversion_never_imports_torch(checkpoint: Path, tmp_path: Path) -> None:
    """split, reshard, merge and verification by bytes, each in its own process; tqdm only where a terminal shows it."""
    eight, three, merged = (str(tmp_path / name) for name in ("eight", "three", "merged"))
    steps = [
        ("split", str(checkpoint), eight, "--tp", "8"),
        ("reshard", eight, three, "--tp", "3"),
        ("verify", three, "--against", str(checkpoint), "--level", "bytes"),
        ("merge", three, merged),
        ("plan", str(checkpoint), "--tp", "2,3"),
        ("inspect", str(checkpoint)),
    ]
    for step in steps:
        assert not imported_by(RUN, *step) & (NEVER | {"huggingface_hub", "tqdm"}), step[0]
    assert (Path(merged) / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


PUBLIC = [
    "DamagedError",
    "LayoutError",
    "Options",
    "StorageError",
    "TpshardError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "demo",
    "inspect",
    "merge",
    "plan",
    "reshard",
    "rollback",
    "split",
    "verify",
]


def test_public_names_are_these() -> None:
    """A name that comes or goes is a decision, not a side effect."""
    assert sorted(tpshard.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(tpshard))


def test_a_public_name_is_the_same_after_every_module_is_loaded() -> None:
    """Importing a submodule sets it on its package: none may have the name of a public function."""
    code = """
import importlib, pkgutil, tpshard
before = {name: getattr(tpshard, name) for name in tpshard.__all__}
for module in pkgutil.iter_modules(tpshard.__path__):
    if module.name != "__main__":
        importlib.import_module(f"tpshard.{module.name}")
changed = [name for name, value in before.items() if getattr(tpshard, name) != value]
assert not changed, changed
"""
    imported_by(code)


# --- what depends on what --------------------------------------------------------------------------------------------


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under ``if TYPE_CHECKING``."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            todo += ast.iter_child_nodes(node)


def imports_of(path: Path) -> Iterator[str]:
    """The absolute name of every module that a file imports, inside functions included, but for types alone."""
    package = ["tpshard", "converters"] if path.parent == CONVERTERS else ["tpshard"]
    for node in nodes_that_run(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            if node.module:
                yield ".".join([*base, node.module])
            else:
                yield from (".".join([*base, alias.name]) for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Names of the core modules that a file imports (``planning`` for ``tpshard.planning``)."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("tpshard.")}


def outside_imports(path: Path) -> set[str]:
    """Top-level names of everything else that a file imports."""
    return {name.partition(".")[0] for name in imports_of(path)} - {"tpshard"}


def up_to_the_plan() -> list[Path]:
    """planning.py and every core module that it needs."""
    found, todo = set(), ["planning"]
    while todo:
        name = todo.pop()
        if name not in found and (CORE / f"{name}.py").exists():
            found.add(name)
            todo += own_imports(CORE / f"{name}.py")
    return [CORE / f"{name}.py" for name in sorted(found)]


def test_nothing_up_to_the_plan_opens_a_file() -> None:
    paths = up_to_the_plan()
    assert len(paths) > 4  # planning, layout, partition, intervals, errors at the least
    for path in paths:
        odd = outside_imports(path) - PLAN_MAY_IMPORT
        assert not odd, f"{path.name} imports {sorted(odd)}"
        calls = (
            node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
        )
        assert not any(isinstance(call, ast.Name) and call.id == "open" for call in calls), path.name


def test_core_modules_do_not_import_in_a_circle() -> None:
    """Whatever a module imports can be laid below it, imports inside functions included."""
    below = {path.stem: own_imports(path) for path in CORE.glob("*.py")}
    done: set[str] = set()
    while rest := {name: needs - done - {name} for name, needs in below.items() if name not in done}:
        ready = {name for name, needs in rest.items() if not needs & rest.keys()}
        assert ready, f"these import each other: {sorted(rest)}"
        done |= ready


def test_converters_speak_only_the_table_vocabulary() -> None:
    """A table may use another table of the same folder, and nothing of the machinery."""
    for path in CONVERTERS.glob("*.py"):
        odd = own_imports(path) - CONVERTERS_MAY_IMPORT - {"converters"} | outside_imports(path) - PLAN_MAY_IMPORT
        assert not odd, f"{path.name} imports {sorted(odd)}"


def test_engine_tables_speak_only_their_vocabulary() -> None:
    """An engine's table says names and order: nothing in it opens a file, or imports torch or an engine."""
    beside = {path.stem for path in (CONVERTERS / "engines").glob("*.py")}
    for path in (CONVERTERS / "engines").glob("*.py"):
        odd = own_imports(path) - ENGINES_MAY_IMPORT - beside | outside_imports(path) - PLAN_MAY_IMPORT - {"struct"}
        assert not odd, f"{path.name} imports {sorted(odd)}"


def test_the_core_names_no_family() -> None:
    """Which model it is, the tables say: no core module holds a ``model_type`` as text, but for the demonstration
    and the self-test, which write models of some families like any user. Methods of quantisation go by names of
    their own, some of which a model has too, and so does a kind of layer.
    """
    model_types = {kind for module in registry.families().values() for kind in module.MODEL_TYPES} - {"mamba"}
    assert len(model_types) > 10
    others = (CORE / "selftest", CORE / "quantisation")
    for path in set(CORE.rglob("*.py")) - {CORE / "demonstration.py", *(p for o in others for p in o.glob("*.py"))}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in model_types:
                raise AssertionError(f"{path.name}:{node.lineno} names the model type {node.value!r}")


# --- what is installed -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that nothing is written beside them, and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for package in ("tpshard", "converters", "tests", "benchmarks"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_wheel_holds_the_package_and_nothing_else(unpacked_wheel: Path) -> None:
    version = metadata.version("tpshard")
    assert {path.name for path in unpacked_wheel.iterdir()} == {"tpshard", f"tpshard-{version}.dist-info"}
    held = {str(path.relative_to(unpacked_wheel / "tpshard")) for path in (unpacked_wheel / "tpshard").rglob("*.*")}
    expected = {str(path.relative_to(CORE)) for path in CORE.rglob("*.py")}
    expected |= {f"converters/{path.relative_to(CONVERTERS)}" for path in CONVERTERS.rglob("*.py")}
    assert held == expected | {"py.typed"}


def test_unpacked_wheel_works_without_the_clone(unpacked_wheel: Path, tmp_path: Path) -> None:
    code = "import tpshard, tpshard.converters, tpshard.registry as r; print(tpshard.__file__, len(r.families()))"
    environment = {**os.environ, "PYTHONPATH": str(unpacked_wheel)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, count = done.stdout.rsplit(maxsplit=1)
    assert Path(where).is_relative_to(unpacked_wheel)
    assert int(count) == len(registry.families())


def test_the_console_script_is_the_cli() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="tpshard")
    assert script.value == "tpshard.__main__:main"
    assert callable(script.load())


def test_version_is_said_once() -> None:
    assert tpshard.__version__ == metadata.version("tpshard")


def test_the_version_is_written_down_once_more_and_alike() -> None:
    """Where reading it costs nothing; the journal of a run names it."""
    from tpshard.release import VERSION

    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == VERSION == tpshard.__version__
