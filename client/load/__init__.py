"""Load for measuring a service: what `millpond bench` and `benchmarks/` run. Each measures one thing and says how."""
