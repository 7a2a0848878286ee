"""The local page: live shares, a timeline, and a policy switch for holders of the token."""
