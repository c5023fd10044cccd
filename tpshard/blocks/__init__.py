"""What most models are made of, each block said once in the vocabulary of :mod:`tpshard.table`.

Tables call the blocks with their family's names and numbers. No block knows a family, and none moves a byte.
"""
