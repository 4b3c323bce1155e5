"""What verbs would do, to be printed: nothing is started, changed or stopped."""
