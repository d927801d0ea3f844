"""Requests whose prompt one replica computes and another one answers, through the whole proxy."""
