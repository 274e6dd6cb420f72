"""Followers: processes that read a run's published weights, version by version, and take no part in it."""
