"""Plans engine layouts of the DeepSeek-V3 shape (671 billion parameters) from headers alone.

    python benchmarks/plan_trillion.py [--engine megatron-legacy] [--tp 8] [--pp 16] [--ep 8] [--layers 61] [--profile]

The checkpoint is 163 sparse files of right headers and no data (bf16, 61 layers, 256 experts, without the prediction
layer), so it takes the room of its headers. Prints seconds by phase and the peak of memory. 61 layers are not 16 equal
stages: the first ones take four.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tpshard.header import build_header, tensor_nbytes

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "topk_method": "noaux_tc", "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840,
}  # fmt: skip
PER_FILE = 280


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint, in the order of the release."""
    hidden, latent, queries, heads, expert, dense = 7168, 512, 1536, 128, 2048, 18432
    yield "model.embed_tokens.weight", (129280, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_a_proj.weight", (queries, hidden)
        yield f"{at}.self_attn.q_a_layernorm.weight", (queries,)
        yield f"{at}.self_attn.q_b_proj.weight", (heads * 192, queries)
        yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", (latent + 64, hidden)
        yield f"{at}.self_attn.kv_a_layernorm.weight", (latent,)
        yield f"{at}.self_attn.kv_b_proj.weight", (heads * 256, latent)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads * 128)
        if layer < 3:
            yield from _mlp(f"{at}.mlp", hidden, dense)
        else:
            yield f"{at}.mlp.gate.weight", (256, hidden)
            yield f"{at}.mlp.gate.e_score_correction_bias", (256,)
            for number in range(256):
                yield from _mlp(f"{at}.mlp.experts.{number}", hidden, expert)
            yield from _mlp(f"{at}.mlp.shared_experts", hidden, expert)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (129280, hidden)


def _mlp(at: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (width, hidden)
    yield f"{at}.up_proj.weight", (width, hidden)
    yield f"{at}.down_proj.weight", (hidden, width)


def make(directory: Path, layers: int) -> int:
    """A checkpoint of headers and holes; returns its parameters."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    every = list(tensors(layers))
    files = -(-len(every) // PER_FILE)
    where: dict[str, str] = {}
    total = 0
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:06d}.safetensors"
        held = every[number * PER_FILE : (number + 1) * PER_FILE]
        header = build_header([(n, "BF16", shape) for n, shape in held], {"format": "pt"}, 8)
        nbytes = sum(tensor_nbytes("BF16", shape) for _, shape in held)
        with (directory / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + nbytes)
        where |= dict.fromkeys((n for n, _ in held), name)
        total += nbytes
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="megatron-legacy")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=16)
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        parameters = make(source, given.layers)
        print(f"{parameters / 1e9:.0f} billion parameters in {len(list(tensors(given.layers))):,} tensors")
        profile = cProfile.Profile()
        if given.profile:
            profile.enable()
        plan(source, given.engine, given.tp, given.pp, given.ep, given.layers)
        if given.profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("cumtime").print_stats(35)
    print(f"peak of memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


def plan(source: Path, engine: str, tp_size: int, pp_size: int, ep_size: int, layers: int) -> None:
    """The phases of an export up to the plan."""
    from tpshard.exporting.arrange import arrange
    from tpshard.exporting.files import place_engine, without
    from tpshard.exporting.given import open_model
    from tpshard.exporting.options import engine_and_version, grid_of
    from tpshard.planning import build_plan

    began = last = (time.perf_counter(), time.process_time())

    def told(phase: str, since: tuple[float, float] | None = None) -> None:
        nonlocal last
        now = (time.perf_counter(), time.process_time())
        wall, cpu = (a - b for a, b in zip(now, since or last, strict=True))
        print(f"{phase:<28}{wall:8.2f} s {cpu:8.2f} s of processor", flush=True)
        last = now

    given = open_model(source)
    told("headers and matching")
    module, version = engine_and_version(engine)
    table = module.table(given.model, version)
    base, extra = divmod(layers, pp_size)
    stages = ",".join(str(base + (stage < extra)) for stage in range(pp_size)) if extra else None
    grid = grid_of(given.model, table, module.ENGINE, tp_size, pp_size, ep_size, stages)
    arranged = arrange(given.model, table, grid, module.ENGINE)
    told("arranging")
    files = place_engine(arranged, table)
    told("placing, headers of files")
    made = build_plan(without(given.placed, arranged.dropped), files.placed)
    told("joining and proving the plan")
    told("total", began)
    moved = sum(extent.nbytes for extent in made.writes)
    print(f"{len(grid.ranks):,} ranks, {len(made.writes):,} stored tensors, {len(made.tasks):,} tasks")
    print(f"{moved / 1e9:,.0f} GB would be written")


if __name__ == "__main__":
    main()
