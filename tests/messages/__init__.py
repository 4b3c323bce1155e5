"""What a person reads when an input is wrong: a table of inputs, and a piece of each message."""
