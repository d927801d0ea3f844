"""The former name of `standalone_mode`, until nothing imports it."""

from llmproxy.remote.cluster.standalone_mode import *  # noqa: F403
