"""Shipped for those who write rules, algorithms and engines: fakes, small workloads, and the checks that each must pass."""
