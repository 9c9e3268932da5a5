"""Fault injection for elastic runs and runs on Ray: fault scripts, an injector, and reports of what the faults cost.

faults.py           faults, and scripts of them, as values and as JSON; random scripts from a seed
fault_injector.py   injects a script's faults into processes and into links between network namespaces, and logs them
update_faults.py    faults inside an island's process: corrupted messages, unusable deltas
ray_faults.py       finds the hub and workers of a run on Ray, and injects faults in a thread
reports.py          what the faults cost an elastic run, or a run with a hub
"""
