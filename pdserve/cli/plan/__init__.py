"""`pdserve plan`: its options, and what it prints."""
