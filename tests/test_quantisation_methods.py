"""Every method that transformers loads is cut by a table, or refused by name with a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commands import refused
from quantmodels import llama, write_quantised
from quantpage import PAGE, page, schemes_of
from quantschemes import compressed_config, gptq

from tpshard.errors import UnsupportedError
from tpshard.quantisation import formats_of
from tpshard.quantisation.methods import REFUSED, TABLES, quantisation_of, table_of

NUMBERS: dict[str, dict[str, Any]] = {  # what a config of the method has at least
    "gptq": {"bits": 4, "group_size": 128}, "auto-round": {"bits": 4, "group_size": 128},
    "compressed-tensors": compressed_config("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "bitnet": {"linear_class": "autobitlinear"},
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}},
}  # fmt: skip


def test_no_method_of_transformers_falls_through() -> None:
    auto = pytest.importorskip("transformers.quantizers.auto", reason="its list of methods is walked")
    methods = {*auto.AUTO_QUANTIZER_MAPPING, *auto.AUTO_QUANTIZATION_CONFIG_MAPPING}
    assert len(methods) > 20
    for method in methods:
        if method in REFUSED:
            assert table_of(method) is None
            continue
        assert formats_of({"quantization_config": {**NUMBERS.get(method, {}), "quant_method": method}}), method


def test_every_table_is_run() -> None:
    names = [name for table in TABLES for name in table.METHODS]
    assert len(names) == len(set(names))
    assert not set(names) & REFUSED.keys()
    for table in TABLES:
        assert schemes_of(table), table.__name__


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == page(), "run: python tests/quantpage.py"


@pytest.mark.parametrize("method", REFUSED)
def test_a_refusal_names_method_reason_and_remedy(method: str, tmp_path: Path) -> None:
    write_quantised(tmp_path / "source", llama(4, 2, 16, 64, 32, 40), gptq(4, 16, quant_method=method))
    reason = refused(3, "split", tmp_path / "source", tmp_path / "out", "--tp", 2, says=(method, "original precision"))
    assert REFUSED[method] in reason
    assert not (tmp_path / "out").exists()


VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq, marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "one kernel"),
    "gptq, marlin by flag": ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "one kernel"),
    "gptq, 5 bits": ({"quant_method": "gptq", "bits": 5}, "2, 3, 4 and 8"),
    "awq, gemv_fast": ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "one kernel"),
    "awq, an unknown layout": ({"quant_method": "awq", "bits": 4, "version": "new"}, "not known"),
    "sparse": (compressed_config("sparse-24-bitmask"), "two of every four"),
    "sparse beside": (
        {**compressed_config("float-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
        "two of every four",
    ),
    "marlin-24": (compressed_config("marlin-24"), "permuted"),
    "an unknown format": (compressed_config("future", {"num_bits": 3}), "not known"),
    "bitnet, packed": ({"quant_method": "bitnet"}, "quarter of the matrix"),
    "bitnet, online": (
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}, "mean",
    ),
    "quark, int4": ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}}, "reordered"),
    "torchao, tiles": (
        {"quant_method": "torchao", "quant_type": {"default": {
            "_type": "Int4WeightOnlyConfig", "_data": {"int4_packing_format": "tile_packed_to_4d"}}}}, "one kernel",
    ),
    "torchao, pickled": ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "pickled"),
    "torchao, swizzled": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "NVFP4WeightOnlyConfig"}}}, "one kernel",
    ),
    "auto-round, marlin": (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:marlin"}, "one kernel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_that_no_rank_can_have_a_part_of(variant: str) -> None:
    config, why = VARIANTS[variant]
    with pytest.raises(UnsupportedError, match=why) as caught:
        formats_of({"quantization_config": config})
    assert re.match(r"config\.json", str(caught.value))


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"compression_config": {"quant_method": "gptq"}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
    ],
)
def test_where_a_config_declares_it(config: dict[str, Any]) -> None:
    assert quantisation_of(config) == {"quant_method": "gptq"}
    assert quantisation_of({"hidden_size": 4}) is None


@pytest.mark.parametrize(
    "config",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"bits": 4, "group_size": 64, "mode": "affine"},
        {key: value for key, value in NUMBERS["compressed-tensors"].items() if key != "quant_method"},
    ],
)
def test_methods_that_old_files_do_not_name(config: dict[str, Any]) -> None:
    assert formats_of({"quantization_config": config})
