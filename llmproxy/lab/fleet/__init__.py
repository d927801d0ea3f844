"""The simulated fleet of a run: its servers in virtual time, their faults, and the format that describes a fleet."""
