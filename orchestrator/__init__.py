"""Asyncio side of Stagewire: decides what each step computes and drives the stages. Never loads torch."""

__version__ = "0.1.0"
