"""The page that a run's coordinator serves to a browser: what the run does now, without Prometheus or Grafana."""
