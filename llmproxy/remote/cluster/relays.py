"""The former name of `cluster_leasing`, until nothing imports it."""

from llmproxy.remote.cluster.cluster_leasing import *  # noqa: F403
