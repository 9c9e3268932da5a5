"""Runs on islands that come and go: the one who starts and watches them, and what each of them does."""
