"""The list of backends and their state: registry, discovery, polls, adapters. Requests do not pass through this
package.
"""
