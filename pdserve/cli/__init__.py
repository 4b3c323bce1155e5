"""The command line: one small file a verb. It prints; it decides nothing."""
