"""The Grafana dashboard as code; `deploy/grafana/headrace.json` is made from it."""
