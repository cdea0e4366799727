"""How much of a known cause's time does the analysis charge to that cause?

In: which truth: `--simulated` programs, whose truth is exact, or faults planted into the real `--demo` on this machine. Out: a table per
cause on standard output; exit status 1 where a target is missed.

    python benchmarks/truth.py --simulated [500] [--seed 0] [--show 10]
    python benchmarks/truth.py --demo [--quick] [--stack ray] [--cause straggler --cause gc] [--ms 40 --ms 160]

--demo is six runs of a minute or two; --quick is one size and half the steps. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys

SIZES = (10.0, 40.0, 160.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--simulated", type=int, nargs="?", const=500, metavar="N", help="programs")
    which.add_argument("--demo", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="the N programs with the largest errors")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stack", choices=("megatron", "ray"), action="append")
    parser.add_argument("--cause", action="append")
    parser.add_argument("--ms", type=float, action="append")
    given = parser.parse_args()
    if given.simulated:
        import truth_simulated

        return 0 if truth_simulated.report(given.simulated, given.seed, given.show) else 1
    import truth_demo

    causes = given.cause or tuple(truth_demo.OWN)
    unknown = [c for c in causes if c not in truth_demo.OWN]
    if unknown:
        parser.error(f"there is no cause {unknown[0]}; there is: {', '.join(truth_demo.OWN)}")
    sizes = given.ms or ((40.0,) if given.quick else SIZES)
    rounds = truth_demo.ROUNDS // 2 if given.quick else truth_demo.ROUNDS
    return 0 if truth_demo.report(given.stack or ("megatron", "ray"), causes, sizes, rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
