"""Batching parameters: which there are, whether they are legal, and how each server writes them down.

Out goes `parameters.Configuration`: the knobs in TensorFlow Serving's names. One file reads and writes each dialect.
Start with `parameters.validate`, `formats.read_batching_file`, `tfserving_file.rendered`.
"""
