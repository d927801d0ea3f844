"""The former name of `pending_connections`, until nothing imports it."""

from llmproxy.remote.cluster.pending_connections import *  # noqa: F403
