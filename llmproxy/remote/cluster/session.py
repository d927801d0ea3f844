"""The former name of `member_session`, until nothing imports it."""

from llmproxy.remote.cluster.member_session import *  # noqa: F403
