"""`pdserve sweep`: a file of lists, its points in the order of fewest restarts, and what each point leaves."""
