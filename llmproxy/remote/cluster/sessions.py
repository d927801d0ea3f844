"""The former name of `member_sessions`, until nothing imports it."""

from llmproxy.remote.cluster.member_sessions import *  # noqa: F403
