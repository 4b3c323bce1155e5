"""The command line: a module a group of verbs, with their arguments and what they print."""
