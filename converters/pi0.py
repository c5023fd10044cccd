"""PI0: PaliGemma, and a smaller Gemma that makes a robot's actions and sees PaliGemma's keys and values.

The two share heads one by one, so both are cut alike. Released files have PaliGemma's embedding as its head alone, and
a head of the smaller model that nothing uses.
Source: transformers ``models/pi0/modeling_pi0.py``, names on disk from ``conversion_mapping.py``.
"""

from __future__ import annotations

from dataclasses import replace

from tpshard.axes import Padded
from tpshard.blocks.composite import whole_projector
from tpshard.blocks.dense import vocabulary_of
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import UNUSED, Table

FAMILY = "pi0"
MODEL_TYPES = ("pi0",)
VLM, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
VOCABULARY = ("@embed_tokens.weight", "lm_head.weight")


def table(c: Config) -> Table:
    vlm = c.nested("vlm_config", model_type="paligemma")
    text, expert = part_of(vlm, "text_config", model_type="gemma"), part_of(c, "dit_config", model_type="gemma")
    hidden = expert.count("hidden_size")

    t = Table(0)
    t.include(_without_vocabulary(table_of(vlm)), (f"{VLM}model.", VLM))
    embeddings = [f"{VLM}model.language_model.{inner}embed_tokens.weight" for inner in ("model.", "")]
    vocab, width = vocabulary_of(text), text.count("hidden_size")
    t.shared(*embeddings, heads=(f"{VLM}lm_head.weight",), vocab=vocab, width=width)
    t.include(_without_vocabulary(table_of(expert)), (f"{EXPERT}model.", EXPERT), axes="expert_")
    rows = Padded("expert_vocab", expert.count("vocab_size")).each()
    t.tensor(f"{EXPERT}lm_head.weight", rows, hidden, role="embed", optional=True, note=UNUSED)
    state, action = c.count("max_state_dim", default=32), c.count("max_action_dim", default=32)
    whole_projector(t, "state_proj", state, hidden)
    whole_projector(t, "action_in_proj", action, hidden)
    whole_projector(t, "action_out_proj", hidden, action)
    whole_projector(t, "action_time_mlp_in", 2 * hidden, hidden)
    whole_projector(t, "action_time_mlp_out", hidden, hidden)
    return t


def _without_vocabulary(part: Table) -> Table:
    kept = replace(part, rules=[rule for rule in part.rules if rule.name not in VOCABULARY], tied=[])
    kept.stacks = part.stacks
    return kept
