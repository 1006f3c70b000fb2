"""Training: configuration, the loop, checkpoints, generation, plots.

Functions are taken from their modules (`from mp_lstm.training.fit import fit`): some share the module's name, and a
command that only plans should not load what training needs.
"""
