"""What qgpu tells Prometheus: native series, and HAMi's names for dashboards that know those."""
