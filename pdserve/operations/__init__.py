"""What a verb does, behind the command line."""
