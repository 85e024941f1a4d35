"""Replicas on Ray Serve: deployments, their processes, their ingress."""
