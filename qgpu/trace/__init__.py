"""Recording what pods did from moment to moment, and showing it: a Perfetto trace, a page."""
