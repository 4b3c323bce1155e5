"""What a recipe will take and hold, computed before anything starts: recipe + model facts to numbers, pure."""
