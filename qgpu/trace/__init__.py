"""Recordings of when pods ran, as a Perfetto trace and as an HTML page."""
