"""Fleets that scale in virtual time: what following each signal keeps of the objectives, and what it costs."""
