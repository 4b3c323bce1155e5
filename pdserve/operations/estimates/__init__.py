"""Other tools that estimate what pdserve does not measure."""
