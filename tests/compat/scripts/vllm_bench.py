"""`vllm bench serve` by its own functions: the `vllm` command wants a platform that some builds do not find."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
