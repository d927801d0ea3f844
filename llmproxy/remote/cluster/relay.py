"""The former name of `leader_client`, until nothing imports it."""

from llmproxy.remote.cluster.leader_client import *  # noqa: F403
