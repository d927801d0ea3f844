"""The simulated fleet of a run: its servers in virtual time, their faults, and how a fleet is described."""
