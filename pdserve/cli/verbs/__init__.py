"""The verbs with their arguments. Each imports what it needs when it runs, so that --help is immediate."""
