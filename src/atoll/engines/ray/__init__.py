"""The engine for asynchronous algorithms on real machines: hub and workers are Ray actors. Imports without Ray."""
