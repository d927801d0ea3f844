"""The sections of the configuration: every key with its type, default and meaning.

The description of a field is the only place where a key is explained: the help of its flag and its comment in
`config.example.yaml` repeat it. Units are in the names.
"""
