"""What outlives a guardian: its journal, its successor, and opening all gates without either."""
