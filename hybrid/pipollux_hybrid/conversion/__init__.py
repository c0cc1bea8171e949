"""Conversion of any model into the layers of a pipeline.

Blocks and other modules stay the model's own; only the operations between them are recorded, by
running the model on an example. :mod:`.as_layers` is the entry point.
"""
