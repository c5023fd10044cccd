"""Works out a table for an architecture that nobody wrote one for, and proves it by experiment.

The model runs small, with random weights, on the CPU. Gradients say exactly which rows of which tensors
feed each input channel of each matrix; from that come axes, units and the order of fused tensors. Read
in this order: :mod:`.probe` (the tiny model), :mod:`.products` (where a parameter meets an activation),
:mod:`.reach` (what feeds what), :mod:`.sums` (where ranks must meet), :mod:`.structure` (units and
segments), :mod:`.numbers` (which key of the config a number follows), :mod:`.draft` (the table),
:mod:`.writing` (its text), :mod:`.noise` and :mod:`.proof` (the experiments), :mod:`.derive` (all of it).

Imports torch and transformers, like :mod:`tpshard.numerics`; nothing else of tpshard does.
"""
