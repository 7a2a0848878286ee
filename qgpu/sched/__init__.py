"""The scheduler: the loop, the ledger, the accounts between pods, and the choice of slices."""
