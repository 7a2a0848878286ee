"""The local page: live shares, a timeline, and a policy switch for who holds the token."""
