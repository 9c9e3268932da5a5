"""The engine for asynchronous algorithms on real machines: the hub in an actor of Ray's, workers in others. Imports without Ray."""
