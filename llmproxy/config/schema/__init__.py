"""The sections of the configuration: every key with its type, default and meaning.

The description of a field is the only explanation of its key: the help of its flag and its comment in
`config.example.yaml` repeat this text. Units are in the names.
"""
