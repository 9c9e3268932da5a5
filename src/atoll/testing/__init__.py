"""Testing kit: fakes of the protocols, small workloads, simulated runs, and conformance checks for rules and algorithms."""
