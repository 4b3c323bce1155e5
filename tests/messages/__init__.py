"""What a person reads when an input is wrong: a table of inputs, their whole messages, and a proof of each fix."""
