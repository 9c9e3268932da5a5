"""The command line: thin verbs over runs/. Nothing heavy is imported before a verb needs it."""
