"""The scheduler: the loop, the ledger, the seam to the planes, and a backend per plane."""
