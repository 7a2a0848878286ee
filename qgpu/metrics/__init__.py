"""Metrics for Prometheus: native series, and the same under HAMi's names for existing dashboards."""
