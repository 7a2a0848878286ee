"""What pods hold: RM objects, memory on each card, and how much of it counts against a limit."""
