"""Writes docs/quantisation.md from the tables of quantisation methods and from what the tests run.

Run it to write the page anew; ``test_quantisation_methods.py`` holds the page against it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from quantschemes import Scheme
from quantweights import METHODS
from test_quantisation import SCHEMES

from tpshard.quantisation import formats_of
from tpshard.quantisation.methods import REFUSED, TABLES, table_of
from tpshard.quantisation.valueformulas import UNKNOWN, formula_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quantisation.md"

_HEAD = """\
# Quantised checkpoints

*Written by `python tests/quantpage.py`; a test holds this page against the tables in `tpshard/quantisation`.*

A quantised matrix is stored as several tensors: values or packed integers, scales, zero points, an order of inputs.
They are cut as one, by the table of the model's family: each stored tensor has the matrix's dimensions at a ratio of
its own, and an axis (heads, feed-forward channels, vocabulary) keeps so many units together as the groups, blocks and
words of all tensors along it ask for. Unpacked, what a rank holds is its slice of the unpacked whole; `merge` gives
back the original files, byte for byte; the level *plan* of `verify` judges that a weight and its scales have not
drifted apart.

* **Degrees** are those that whole groups allow: `tpshard inspect` lists them, and a refusal names the tensor, its
  sizes, its groups and the degrees that work, equal and unequal. Groups that lie across the parts of a fused matrix, or
  across rows of a matrix in one line along its inputs, allow degree 1 alone.
* **Modules that are not quantised** (`ignore`, `modules_to_not_convert`, `dynamic`) are told by their tensors: a plain
  `weight` is cut as ever. Which of several config groups a matrix is of, its shapes and dtypes tell, and what the
  table of its family promises.
* **Where it is declared**: `quantization_config` or `compression_config` in config.json or in its `text_config`; else
  ModelOpt's own `hf_quant_config.json` beside it.
* **Whole on every rank** are single values, codebooks and tables; scales under an order of inputs (`desc_act`,
  `actorder`), which names groups of the whole matrix; `weight_shape` and `quant_state`, which tell the whole matrix's,
  as does what torchao writes into the header of the source's file. The manifest notes how a rank is to use them.
* **Scales of the KV cache** (`k_scale`, `v_scale`) are whole, or cut with the KV heads where every head has its own.
* **Padding** of a quantised output head is zeros in all of its tensors. In nf4 and fp4 a zero byte is no zero: ignore
  the padded outputs there, as ever.

## Values

Where a formula is known, a value is `(code - zero point) * scale` or `code * scale + offset` in float32, bit-equal to
the code that each method's authors publish: `tpshard/quantisation/valueformulas.py` names it.

* **`tpshard verify SHARDS --against SRC --level forward`** runs every rank on the values of what that rank stores, made
  on the fly: wrong zero points, shifted scales, another order of nibbles, a `g_idx` that counts from elsewhere show as
  wrong sums, named by module. *twin* and *backward* run on the twin, which is not quantised; *runtime* says that it
  does not run.
* **`tpshard split SRC OUT --tp N --dequantize bf16`** (`fp16`, `fp32`) cuts the values, rounded once to nearest even,
  at degrees that groups forbid as well; `reshard` and `merge` take it too, of shards that are quantised, and give the
  same files. Values are computed while they are read, in bounded memory. The config loses its `quantization_config`;
  scales of activations and of the KV cache are left out, and the manifest says so; `merge` gives the checkpoint of the
  values. `verify OUT --against SRC` (and `split --verify`) compares with the values that the quantised SRC makes:
  *bytes* and *forward* run on them. Scales of 16 bits are multiplied in float32: where an engine multiplies in float16
  and rounds that to bfloat16, its last bit may differ.

SmolLM2-135M, quantised by GPTQ's, AWQ's, bitsandbytes', torchao's and compressed-tensors' writers, was taken through
all of this: [measured](measurements/quantised.md).

## Methods that are cut

Split, reshard, merge and verify at the levels structure, digest, bytes and plan work for all of these; *forward* and
`--dequantize` where there is a formula (**yes**). Each scheme named is run at random sizes and degrees, its values read
back by an independent reader.

| `quant_method` | stored as | split, reshard, merge | bytes, plan | *forward*, `--dequantize` | run in the tests |
|---|---|---|---|---|---|
"""

_REFUSED = """
## Methods that are refused

None of the operations runs: the first says why, before anything is written.

| `quant_method` | why |
|---|---|
"""

_VARIANTS = """
Refused within methods that are cut, each with its reason: GPTQ in Marlin's, ExLlama's and other kernels' layouts; AWQ's
`gemv_fast` and `llm-awq`; compressed-tensors' `sparse-24-bitmask`, `sparse-bitmask` and `marlin-24`; BitNet packed into
bytes, and online; Quark's integers of 4 bits and less; torchao's int4 in tiles, its NVFP4 and MX tensors, and files of
pickled classes. Cut, and without a formula: ModelOpt's W4A8 (`weight_scale_2` beside 4 bits), AWQ in other than 4 bits,
Gemma's embeddings with several scales a row.
"""


def schemes_of(table: ModuleType) -> list[str]:
    """The schemes of a method's table that the tests run."""
    found = [scheme.name for scheme in SCHEMES if table_of(str(scheme.config["quant_method"])) is table]
    return found + (["test_a_bank_in_mxfp4_is_cut_by_whole_groups"] if "mxfp4" in table.METHODS else [])


def has_formula(scheme: Scheme) -> bool:
    """Whether values are known of every format of a scheme."""
    formats = formats_of({"quantization_config": scheme.config})
    return all(formula_of(scheme.config, fmt) is not None for fmt in formats)


def values_column(table: ModuleType) -> str:
    """What of a method can be run and dequantised."""
    why = next((why for method, why in UNKNOWN.items() if method in table.METHODS), None)
    if why is not None:
        return f"no: {why}"
    schemes = [scheme for scheme in SCHEMES if table_of(str(scheme.config["quant_method"])) is table]
    lacking = [scheme.name for scheme in schemes if not has_formula(scheme)]
    if lacking:
        return f"yes, but {', '.join(lacking)}"
    run = [name for name, (config, _) in METHODS.items() if table_of(str(config["quant_method"])) is table]
    return "yes" + (f"; run: {', '.join(run)}" if run else "")


def page() -> str:
    """The whole page."""
    rows = []
    for table in TABLES:
        methods = ", ".join(f"`{method}`" for method in table.METHODS)
        about = " ".join((table.__doc__ or "").split("\n\n")[0].split()).rstrip(".").replace("``", "`")
        schemes = ", ".join(schemes_of(table))
        rows.append(f"| {methods} | {about} | yes | yes | {values_column(table)} | {schemes} |\n")
    refused = [f"| `{method}` | {why} |\n" for method, why in REFUSED.items()]
    return _HEAD + "".join(rows) + _REFUSED + "".join(refused) + _VARIANTS


if __name__ == "__main__":
    PAGE.write_text(page())
