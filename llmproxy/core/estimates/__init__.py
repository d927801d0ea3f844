"""Estimates of tokens and times of requests, learned from earlier requests."""
