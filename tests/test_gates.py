"""``tpshard.toml`` and baselines: what is refused, what overrides what, and what counts as a drift."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpshard.baseline import compare, read_baseline, write_baseline
from tpshard.errors import DamagedError, UsageError
from tpshard.gates import Gates, expanded, read_settings
from tpshard.reports import Verification
from tpshard.verdicts import LevelVerdict, Measure, excess, within, worst
from tpshard.verification import gate_function


def settings(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "tpshard.toml"
    path.write_text(text)
    return read_settings(path)


def test_a_file_of_gates(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        """
        [verify]
        levels = ["quick", "digest"]
        compute = "fp32"
        tokens = 4
        min_coverage = 0.5
        mode = "local"
        [gates.fp32]
        default = 1e-5
        [gates.fp32.blocks]
        "model.layers.*.mlp" = 2e-5
        "*" = 3e-5
        [gates.native]
        default = 0.02
        """,
    )
    assert found.levels == ("structure", "digest", "plan")
    assert (found.compute, found.mode, found.tokens, found.min_coverage) == ("fp32", "local", 4, 0.5)
    gates = found.gates
    assert gates.of("fp32", "model.layers.7.mlp") == 2e-5 and gates.of("fp32", "lm_head") == 3e-5
    assert gates.of("fp64", "lm_head") == 1e-10 and gates.of("fp64", "x", fp32_inside=True) == 1e-7
    assert gates.of("native", "x") == 0.02 and Gates().of("native", "x") is None
    assert gates.logits("fp32") == 1e-4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[verfy]\n", "verfy"),
        ("[verify]\nlevel = ['plan']\n", "verify.level"),
        ("[verify]\nlevels = ['plans']\n", "'plans'"),
        ("[verify]\nlevels = 'plan'\n", "verify.levels"),
        ("[verify]\nlevels = []\n", "no level"),
        ("[verify]\ntokens = 0\n", "verify.tokens"),
        ("[verify]\ntokens = true\n", "verify.tokens"),
        ("[verify]\nmin_coverage = 100\n", "verify.min_coverage"),
        ("[verify]\ncompute = 'bf16'\n", "verify.compute"),
        ("[verify]\nmode = ['local']\n", "verify.mode"),
        ("verify = 3\n", "verify"),
        ("[gates.fp16]\ndefault = 1.0\n", "gates.fp16"),
        ("[gates.fp64]\ndefaults = 1.0\n", "gates.fp64.defaults"),
        ("[gates.fp64]\ndefault = '1e-10'\n", "gates.fp64.default"),
        ("[gates.fp64]\ndefault = nan\n", "gates.fp64.default"),
        ("[gates.fp64]\ndefault = -1\n", "gates.fp64.default"),
        ("[gates.fp64.blocks]\n'a.*' = inf\n", 'gates.fp64.blocks."a.*"'),
        ("[gates.fp64\n", "not TOML"),
        ("\x00", "not TOML"),
    ],
)
def test_what_nothing_reads_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(tmp_path, text)
    assert said in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_settings(tmp_path / "none.toml")


def test_levels_and_groups() -> None:
    assert expanded(["plan", "structure", "plan"]) == ("structure", "plan")
    assert expanded(["standard"]) == ("structure", "digest", "bytes", "plan", "forward")
    assert len(expanded(["full"])) == 8
    for wrong in ([], ["fast"]):
        with pytest.raises(UsageError):
            expanded(wrong)


def test_the_gate_of_a_point_takes_overrides_of_the_modules_around_it(tmp_path: Path) -> None:
    gates = settings(
        tmp_path, "[gates.fp64]\ndefault = 1e-12\n[gates.fp64.blocks]\n'model.layers.?.mlp' = 1e-3\n"
    ).gates
    gate = gate_function(gates, "fp64")
    assert gate("model.layers.3.mlp.down_proj", 1e-10) == 1e-3
    assert gate("model.layers.3.self_attn.o_proj", 1e-10) == 1e-12
    assert gate("model.layers.3.self_attn.o_proj", 1e-7) == 1e-7
    assert gate("model.layers.3.self_attn.o_proj", 5e-4) == 5e-4  # calibrated: stays, unless overridden
    assert gate("model.layers.3.mlp", 5e-4) == 1e-3
    assert gate_function(Gates(), "native")("x", 0.004) == 0.004


# -- baselines ---------------------------------------------------------------------------------------


def report(error: float = 1e-15, **changes: Any) -> Verification:
    measures = [
        Measure("model.layers.0.mlp.down_proj", "model.layers.0.mlp", "sum", None, error, None, error, 1e-10, "pass"),
        Measure("model.norm", "model.norm", "replicated", 1, 2e-16, None, 0.0, 1e-10, "pass"),
    ]
    verdict = LevelVerdict("forward", "passed", "zero-pad", measures, coverage=1.0)
    made = Verification("verify", "out", "src", 2, ["forward"], True, verdicts=[verdict], rank_bytes=[10, 12])
    made.versions = {"torch": "2.13.0"}
    made.hardware = {"machine": "x86_64", "processor": "P"}
    made.gates = {"compute": "fp64"}
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def held(tmp_path: Path, now: Verification, before: Verification | None = None) -> Verification:
    path = tmp_path / "baseline.json"
    write_baseline(path, before or report())
    compare(now, path, read_baseline(path))
    return now


def test_the_same_run_passes(tmp_path: Path) -> None:
    now = held(tmp_path, report())
    assert now.passed and now.findings == [] and now.baseline["compared"] and now.baseline["errors"] == 2


def test_an_error_that_grew_fails_only_near_its_gate(tmp_path: Path) -> None:
    assert held(tmp_path, report(9e-13)).passed  # 900 times larger, and still below a hundredth of the gate
    now = held(tmp_path, report(2e-12))
    assert not now.passed and now.status == 1 and now.verdicts[0].verdict == "failed"
    assert now.verdicts[0].measures[0].status == "drift" and "2.00e-12" in now.findings[0].message
    assert held(tmp_path, report(7e-12), report(2e-12)).passed  # not fourfold
    assert not held(tmp_path, report(9e-12), report(2e-12)).passed


def test_shrunk_coverage_lost_points_and_changed_sizes_fail(tmp_path: Path) -> None:
    now = report()
    now.verdicts[0].coverage = 0.999
    assert "coverage shrank" in held(tmp_path, now).findings[0].message and not now.passed
    now = report()
    now.verdicts[0].coverage = None
    assert not held(tmp_path, now).passed
    now = report()
    now.verdicts[0].measures.pop()
    assert "replicated model.norm on rank 1" in held(tmp_path, now).findings[0].message and not now.passed
    now = report(rank_bytes=[10, 13])
    assert "sizes changed" in held(tmp_path, now).findings[0].message and not now.passed


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {"torch": "2.14.0"}},
        {"hardware": {"machine": "aarch64", "processor": "P"}},
        {"gates": {"compute": "fp32"}},
    ],
)
def test_errors_of_another_machine_torch_or_dtype_are_not_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    now = held(tmp_path, report(2e-12, **changes))
    assert now.passed and not now.baseline["compared"] and now.baseline["errors"] == 0
    assert "not compared with the baseline" in now.warnings[0]
    assert not held(tmp_path, report(rank_bytes=[10, 13], **changes)).passed  # sizes are the same everywhere


@pytest.mark.parametrize("changes", [{}, {"versions": {}, "gates": {}}, {"hardware": {"machine": "aarch64"}}])
@pytest.mark.parametrize(
    "verdicts",
    [[], [LevelVerdict("plan", "passed")], [LevelVerdict("forward", "not_run")]],
    ids=["none", "plan", "not_run"],
)
def test_a_level_of_the_baseline_that_was_not_run_fails(
    tmp_path: Path, verdicts: list[LevelVerdict], changes: dict[str, Any]
) -> None:
    """A run without torch bears another key than the baseline's; that must not excuse what it left out."""
    now = held(tmp_path, report(verdicts=verdicts, **changes))
    assert not now.passed and now.status == 1
    assert "holds the level 'forward', which was not run" in now.findings[0].message
    more = report(verdicts=[*report().verdicts, LevelVerdict("plan", "passed")])
    assert held(tmp_path, more).passed  # more than the baseline has is no drift


@pytest.mark.parametrize("changes", [{}, {"hardware": {"machine": "aarch64"}}])
def test_another_degree_fails(tmp_path: Path, changes: dict[str, Any]) -> None:
    now = held(tmp_path, report(tp_size=4, rank_bytes=[5, 5, 6, 6], **changes))
    assert not now.passed and not now.baseline["compared"]
    assert [finding.message.split(";")[0] for finding in now.findings] == [
        f"there are 4 ranks, and 2 in the baseline {tmp_path / 'baseline.json'}"
    ]


def test_only_a_pass_makes_a_baseline(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only a verification that passed"):
        write_baseline(tmp_path / "b.json", report(passed=False))
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "tpshard.baseline/2"}', '{"schema": "tpshard.baseline/1", "key": {}}',
             '{"schema": "tpshard.baseline/1", "key": {}, "rank_bytes": [], "levels": {"forward": 3}}', "\xff"]
)  # fmt: skip
def test_a_damaged_baseline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedError):
        read_baseline(path)
    with pytest.raises(UsageError, match="--write-baseline"):
        read_baseline(tmp_path / "none.json")


def test_hostile_errors_in_a_baseline_do_not_pass_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    write_baseline(path, report())
    stored = json.loads(path.read_text())
    stored["levels"]["forward"]["errors"] = dict.fromkeys(stored["levels"]["forward"]["errors"], "0.5")
    path.write_text(json.dumps(stored))
    with pytest.raises(DamagedError, match="not a whole baseline"):
        read_baseline(path)


# -- measures ----------------------------------------------------------------------------------------


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e300))
def test_nan_and_infinity_pass_no_gate(error: float, gate: float) -> None:
    error = abs(error)
    measure = Measure("p", "b", "sum", None, error, None, error, gate, "pass")
    assert within(error, gate) == (math.isfinite(error) and error <= gate)
    if math.isfinite(error) and gate > 0:
        assert (excess(measure) <= 1) == within(error, gate) or math.isclose(error, gate)
    else:
        assert excess(measure) == (0.0 if error == 0 else math.inf)


def test_the_worst_measure_is_the_one_furthest_over_its_gate() -> None:
    def measure(error: float, gate: float) -> Measure:
        return Measure("p", "b", "sum", None, error, None, error, gate, "pass")

    near, far, broken = measure(0.5e-10, 1e-10), measure(1e-8, 1e-7), measure(math.nan, 1.0)
    assert worst([near, far]) is near and worst([far, broken, near]) is broken and worst([]) is None
