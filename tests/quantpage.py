"""Writes docs/quantisation.md from the tables of quantisation methods and from what the tests run.

Run it to write the page anew; ``test_quantisation_methods.py`` holds the page against it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from test_quantisation import SCHEMES

from tpshard.quantisation.methods import REFUSED, TABLES, table_of

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
  `weight` is cut as ever. Which of several config groups a matrix is of, its shapes and dtypes tell.
* **Whole on every rank** are single values, codebooks and tables; scales under an order of inputs (`desc_act`,
  `actorder`), which names groups of the whole matrix; `weight_shape` and `quant_state`, which tell the whole matrix's.
  The manifest notes how a rank is to use them.
* **Scales of the KV cache** (`k_scale`, `v_scale`) are whole, or cut with the KV heads where every head has its own.
* **Padding** of a quantised output head is zeros in all of its tensors. In nf4 and fp4 a zero byte is no zero: ignore
  the padded outputs there, as ever.

## Values

For FP8, GPTQ, AWQ, compressed-tensors, MXFP4, ModelOpt (but its 4-bit AWQ) and Quark the values are known by formula,
`(code - zero point) * scale` in float32, bit-equal to the code that each method's authors publish:
`tpshard/quantisation/valueformulas.py` names it.

* **`tpshard verify SHARDS --against SRC --level forward`** runs every rank on the values of what that rank stores, made
  on the fly: wrong zero points, shifted scales, another order of nibbles, a `g_idx` that counts from elsewhere show as
  wrong sums, named by module. *twin* and *backward* run on the twin, which is not quantised; *runtime* says that it
  does not run.
* **`tpshard split SRC OUT --tp N --dequantize bf16`** (`fp16`, `fp32`) cuts the values, rounded once to nearest even,
  at degrees that groups forbid as well. They are computed while they are read, in bounded memory. The config loses its
  `quantization_config`; scales of activations and of the KV cache are left out, and the manifest says so; `merge` gives
  the checkpoint of the values. Scales of 16 bits are multiplied in float32: where an engine multiplies in float16 and
  rounds that to bfloat16, its last bit may differ.

## Methods that are cut

Split, reshard, merge and verify (structure, digest, bytes, plan) work for all of these; each scheme named is run at
random sizes and degrees, its values read back by an independent reader.

| `quant_method` | stored as | run in the tests |
|---|---|---|
"""

_REFUSED = """
## Methods that are refused

| `quant_method` | why |
|---|---|
"""

_VARIANTS = """
Refused within methods that are cut, each with its reason: GPTQ in Marlin's, ExLlama's and other kernels' layouts; AWQ's
`gemv_fast` and `llm-awq`; compressed-tensors' `sparse-24-bitmask`, `sparse-bitmask` and `marlin-24`; BitNet packed into
bytes, and online; Quark's integers of 4 bits and less.
"""


def schemes_of(table: ModuleType) -> list[str]:
    """The schemes of a method's table that the tests run."""
    found = [scheme.name for scheme in SCHEMES if table_of(str(scheme.config["quant_method"])) is table]
    return found + (["test_a_bank_in_mxfp4_is_cut_by_whole_groups"] if "mxfp4" in table.METHODS else [])


def page() -> str:
    """The whole page."""
    rows = []
    for table in TABLES:
        methods = ", ".join(f"`{method}`" for method in table.METHODS)
        about = " ".join((table.__doc__ or "").split("\n\n")[0].split()).rstrip(".").replace("``", "`")
        rows.append(f"| {methods} | {about} | {', '.join(schemes_of(table))} |\n")
    refused = [f"| `{method}` | {why} |\n" for method, why in REFUSED.items()]
    return _HEAD + "".join(rows) + _REFUSED + "".join(refused) + _VARIANTS


if __name__ == "__main__":
    PAGE.write_text(page())
