"""Engines run algorithms: they own the clock, move the bytes, and report. They are given models and data; they import neither."""
