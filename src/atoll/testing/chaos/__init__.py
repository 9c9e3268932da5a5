"""Fault injection for elastic runs and runs on Ray: fault scripts, an injector, and reports of what the faults cost."""
