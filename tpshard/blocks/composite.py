"""Models of several parts: a language model, and towers that turn images or sounds into vectors beside its tokens.

A composite's table includes the tables of its parts, which the parts' own ``model_type`` finds, and adds what
connects them. Releases of transformers have put the parts below different names; the prefixes here are all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpshard.axes import Dim, Units
from tpshard.config import Config
from tpshard.registry import part_of, table_of
from tpshard.table import Prefix, Rule, Table

MODEL = ("model.", "")  # what stands before a composite's own tensors
LANGUAGE: tuple[Prefix, ...] = (
    ("model.language_model.", ""),  # transformers 4.52 and later
    ("language_model.model.", "language_model."),  # before
    ("model.language_model.model.", "model.language_model."),
    ("model.", ""),
    ("model.text_model.", ""),
    ("text_model.model.", "text_model."),
    ("language_model.", ""),  # without a head
    ("text_model.", ""),
)


def language_config(c: Config, *names: str, model_type: str, tied: bool = False) -> Config:
    """The config of the language model that ``names`` (``text_config``) hold, else the whole where that counts layers.

    The head is tied where the whole or the part says so; ``tied`` is what the whole says by default.

    Raises:
        DamagedError: there is none, and the whole counts no layers itself.
    """
    names = names or ("text_config", "llm_config")
    if c.get(*names) is None and c.get("num_hidden_layers") is not None:
        text = Config({**c.values, "model_type": model_type})
    else:
        text = part_of(c, *names, model_type=model_type)
    is_tied = c.flag("tie_word_embeddings", default=tied) or text.flag("tie_word_embeddings", default=False)
    return Config({**text.values, "tie_word_embeddings": is_tied})


def include_language(t: Table, text: Config) -> None:
    """The language model's table, under any of the names that releases have given it."""
    t.include(table_of(text), *LANGUAGE)


def include_tower(t: Table, tower: Config, *at: str, axes: str = "vision_", optional: bool = False) -> None:
    """A tower's table below one of the modules ``at``; more ranks than it has heads hold it whole."""
    places = [f"{outer}{name}." for name in at for outer in MODEL]
    pairs = [(f"{place}{inner}", f"{place}{inner}") for place in places for inner in ("", "vision_model.")]
    t.include(table_of(tower), *pairs, axes=axes, or_whole=True, optional=optional)


def include_respelt(
    t: Table, part: Table, names: Mapping[str, str], *prefixes: Prefix, axes: str = "", or_whole: bool = False
) -> None:
    """A part's table as :meth:`Table.include` takes it, some of whose names files spell in either of two ways.

    ``names`` gives, for pieces of the names of its layers, the other spelling; a file has one of the two throughout.
    """

    def respelt(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    def with_rules(rules: list[Rule]) -> Table:
        return replace(part, rules=rules, tied=[], choices=[], shares=[], spellings=[], modules=[], stacks=[])

    two_ways = [rule for rule in part.rules if rule.stack == 0 and respelt(rule.name) != rule.name]
    rest = replace(part, rules=[rule for rule in part.rules if rule not in two_ways])
    rest.stacks = part.stacks
    t.include(rest, *prefixes, axes=axes, or_whole=or_whole)
    for rules in (two_ways, [rule._replace(name=respelt(rule.name)) for rule in two_ways]):
        t.include(with_rules(rules), *prefixes, axes=axes, or_whole=or_whole, optional=True)
    t.one_stack_of(len(t.stacks) - 2, len(t.stacks) - 1)


def projector_channels(width: int, name: str = "projector") -> Dim:
    """The channels between the two matrices of a projector; more ranks than channels hold all."""
    return Units(name, width, noun="channels of the projector", or_whole=True).each()


def projector(
    t: Table,
    at: str,
    into: int,
    width: int,
    out: int,
    *,
    bias: bool = True,
    names: tuple[str, str] = ("linear_1", "linear_2"),
    axis: str = "projector",
) -> None:
    """Two matrices ``[width, into]`` and ``[out, width]`` with an activation between, below the module ``at``.

    ``axis`` is the name of the axis between, where a model has projectors of several widths.
    """
    channels = projector_channels(width, axis)
    t.linear(f"{at}.{names[0]}", channels, into, role="projector_in", bias=bias)
    t.linear(f"{at}.{names[1]}", out, channels, role="projector_out", bias=bias)


def input_norm(t: Table, name: str, width: int, *, bias: bool = True) -> None:
    """A norm of what goes into a projector, which every rank has whole, though its module's matrices are cut."""
    for part in ("weight", "bias") if bias else ("weight",):
        t.whole(f"{name}.{part}", width, why="a norm of what goes into the projector")


def whole_projector(t: Table, name: str, into: int, out: int, *, bias: bool = True) -> None:
    """A projector of one matrix ``[out, into]``: to cut it would need a gather of all that it makes."""
    for part, dims in (("weight", (out, into)), ("bias", (out,))) if bias else (("weight", (out, into)),):
        t.whole(f"{name}.{part}", *dims, why="a projector of one matrix: a cut would need a gather of all it makes")
