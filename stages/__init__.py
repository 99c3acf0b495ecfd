"""Stages: one rank's slice of a model, its streams and its links to the neighbouring ranks.

Code in this package enqueues work on streams and returns Points; it never imports asyncio.
This module stays empty so that the torch-free files below it load without torch.
"""
