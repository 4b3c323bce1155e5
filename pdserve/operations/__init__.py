"""Do what a verb does, behind the command line."""
