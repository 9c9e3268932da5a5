"""Settings as frozen dataclasses: type checks, overrides by path, and JSON records."""
